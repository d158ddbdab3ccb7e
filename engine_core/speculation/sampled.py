"""The base of proposers that sample their drafts: sequences of their own, which follow the target's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.engine_core.averages import blend
from quire.engine_core.executor import StepResult
from quire.engine_core.request import Request
from quire.engine_core.speculation.proposer import Proposer, drafts_worthwhile
from quire.kernels.runner import SamplingConfig, Sequences

_CATCH_UP_SECONDS = 0.03  # of a step, for tokens that sequences are behind: others wait for it
_LEAST_CATCH_UP, _MOST_CATCH_UP = 16, 256  # tokens
_FEW_TOKENS = 4  # of each sequence in a step: more are a prompt's
_FIRST_ACCEPTANCE = 0.7  # before anything is known
_LEARN = 0.1  # weight of a draft
_TRY_EVERY = 32  # steps without a draft, after which one is tried


@dataclass(slots=True)
class Draft:
    """The proposer's sequence of a request; it has the target's tokens from number `first` on."""

    slot: int
    num_tokens: int  # number of leading tokens equal to the target's
    num_computed: int = 0
    first: int = 0
    acceptance: float = _FIRST_ACCEPTANCE
    since_try: int = 0
    num_drafts: int = 0  # number of drafts that were proposed last

    @property
    def num_behind(self) -> int:
        """Number of tokens to compute before it drafts."""
        return self.num_tokens - self.num_computed


class SampledDrafts(Proposer):
    """Sequences that have the sampling parameters and the seed of the target's.

    So both sample with the same random numbers, and agree as often as they can. A request whose sequence there are no
    pages for, or which is not computed yet, has no drafts.
    """

    def __init__(
        self, sequences: Sequences, target: Sequences, max_num_batched_tokens: int, clock: Callable[[], float] | None
    ) -> None:
        """`target` has the sequences to draft for, and `sequences` will have those that follow them."""
        self._sequences = sequences
        self._target = target
        self._step_tokens = min(max_num_batched_tokens, _MOST_CATCH_UP)
        self._clock = clock or time.monotonic
        self._drafts: dict[Request, Draft] = {}
        self._without: set[Request] = set()  # for whose prompts there were too few pages
        self._of_slot: dict[int, Draft] = {}  # by the target's slot: those proposed last
        self._seconds = 0.0  # a draft takes
        self._prompt_token_seconds = 0.0

    @property
    def seconds(self) -> float:
        """See Proposer."""
        return self._seconds

    def learn(self, slots: list[int], accepted: list[int]) -> None:
        """See Proposer."""
        for slot, held in zip(slots, accepted, strict=True):
            draft = self._of_slot.get(slot)
            if draft is not None:
                for number in range(min(held + 1, draft.num_drafts)):
                    draft.acceptance += _LEARN * ((number < held) - draft.acceptance)

    def end(self, request: Request) -> None:
        """Close its sequence."""
        self._without.discard(request)
        self._of_slot.pop(request.slot, None)
        if (draft := self._drafts.pop(request, None)) is not None:
            self._sequences.close(draft.slot)

    def _open(
        self, request: Request, config: SamplingConfig, cache_salt: str | None, first: int = 0,
        logprobs: int | None = None,
    ) -> Draft | None:  # fmt: skip
        """Open the sequence of a request; None if there are too few pages for it, now and for good."""
        config.logprobs, config.prompt_logprobs = logprobs, None
        config.first_position = first
        tokens = self._target.tail(request.slot, first)
        num_prompt = max(request.num_prompt_tokens - first, 1)
        slot = self._sequences.open(tokens, num_prompt, sampling=config, cache_salt=cache_salt)
        found = self._sequences.start(slot, len(tokens))
        if found is None:
            self._sequences.close(slot)
            self._without.add(request)
            return None
        draft = self._drafts[request] = Draft(slot, len(tokens), found, first)
        return draft

    def _follow(self, request: Request, draft: Draft) -> None:
        """Give the draft the tokens that the target has sampled since, in the place of its own."""
        sequences, size = self._sequences, draft.num_tokens
        new, own = self._target.tail(request.slot, draft.first + size), sequences.tail(draft.slot, size)
        pairs = enumerate(zip(new, own, strict=False))
        same = next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(new), len(own)))
        if same < len(own):
            left = sequences.truncate(draft.slot, size + same, recompute_last=False)
            draft.num_computed = min(draft.num_computed, left)
        draft.num_tokens += same
        for token in new[same:]:
            sequences.append(draft.slot, token)
            draft.num_tokens += 1

    def _worthwhile(self, draft: Draft, least: float) -> int:
        """Return the number of drafts that are all accepted with a probability of `least` or more."""
        return drafts_worthwhile(min(max(draft.acceptance, 1e-3), 0.99), least)

    def _is_tried(self, draft: Draft) -> bool:
        """Return True if one draft is to be tried, although it is not worthwhile."""
        draft.since_try = (draft.since_try + 1) % _TRY_EVERY
        return draft.since_try == 0

    @property
    def _catch_up_tokens(self) -> int:
        """Number of missing prompt tokens that a step computes."""
        seconds = self._prompt_token_seconds
        count = int(_CATCH_UP_SECONDS / seconds) if seconds else 0
        return min(max(count, _LEAST_CATCH_UP), self._step_tokens)

    def _timed(self, num_sequences: int, num_tokens: int, compute: Callable[[], StepResult]) -> StepResult:
        """Learn how long a step takes."""
        begun = self._clock()
        result = compute()
        seconds = self._clock() - begun
        if num_tokens > _FEW_TOKENS * num_sequences:
            self._prompt_token_seconds = blend(self._prompt_token_seconds, seconds / num_tokens)
        else:
            self._seconds = blend(self._seconds, seconds / num_sequences)
        return result

    def _hand_over(self, request: Request, draft: Draft, most: int) -> int:
        """Append what was sampled to the target's sequence; return how many tokens that is."""
        tokens = self._sequences.tail(draft.slot, draft.num_tokens)[:most]
        size = request.num_tokens
        if not tokens or not self._target.reserve(request.slot, size + len(tokens)):
            tokens = []
        for token in tokens:
            self._target.append(request.slot, token)
        draft.num_drafts = len(tokens)
        self._of_slot[request.slot] = draft
        return len(tokens)
