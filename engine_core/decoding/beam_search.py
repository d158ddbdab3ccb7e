"""Beam search: the continuations of one prompt whose tokens are the most probable together.

The definition is that of `transformers`' `generate(num_beams=beam_width, do_sample=False)`. In each step the likeliest
continuations of all live beams are taken: of the `beam_width` best, those that stop are finished; the best that don't
stop are the next beams. A finished one scores its log probability over its length to the `length_penalty`, and the
search ends at the full length, or when `beam_width` are finished and no live beam can beat the worst of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.engine_core.decoding.single import open_sequence, sampling_config
from quire.engine_core.executor import Executor, LogprobsEntry
from quire.engine_core.request import NO_SLOT, Decoding, Request, StepOutcome
from quire.engine_core.validation import RejectedError, check_generation, check_prompt_only
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import (
    BeamSequence,
    EngineCoreOutput,
    EngineCoreRequest,
    EventType,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
)


class Link(NamedTuple):
    """The last position of a beam, linked to the one before it: beams share their first positions."""

    before: Link | None
    entry: TokenLogprobs


@dataclass(slots=True)
class Beam:
    """A live continuation. `source` is its slot, or the one that it is still to be forked from."""

    logprob: float
    path: Link | None
    slot: int | None
    source: int

    @property
    def token_id(self) -> int:
        """The last token; there is one once the beam has gone on from the prompt."""
        assert self.path is not None
        return self.path.entry.token_ids[0]


class Candidate(NamedTuple):
    """A beam with one more token: the `rank`-th likeliest after it."""

    logprob: float
    beam: Beam
    entry: LogprobsEntry
    rank: int

    @property
    def token_id(self) -> int:
        """The added token."""
        return self.entry[0][self.rank]

    def path(self, num_logprobs: int) -> Link:
        """Return the beam's path with this token, and the `num_logprobs` likeliest tokens at its position."""
        token_ids, logprobs, _ = self.entry
        top = slice(1, 1 + num_logprobs)
        own = TokenLogprobs([self.token_id, *token_ids[top]], [logprobs[self.rank], *logprobs[top]], self.rank)
        return Link(self.beam.path, own)


class Finished(NamedTuple):
    """A continuation that has ended, and its score."""

    score: float
    logprob: float
    path: Link
    stopped: bool


def num_candidates(beam_width: int, num_stop_tokens: int) -> int:
    """Return how many continuations each step takes: even if all that can stop do, `beam_width` are left."""
    return max(2, 1 + num_stop_tokens) * beam_width


# Fields without meaning in a beam search, with the values that change nothing.
_NOT_WITH_BEAMS: dict[str, tuple[object, ...]] = {
    "temperature": (0.0, 1.0),
    "top_k": (0, -1),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "min_tokens": (0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words_token_ids": (None, []),
    "prompt_logprobs": (None,),
    "structured_outputs": (None,),
}


class BeamSearch(Decoding):
    """One search: its live beams, each a sequence in a slot of its own, and the best finished continuations."""

    __slots__ = ("_max_tokens", "done", "finished", "length", "live", "num_candidates", "width")

    def __init__(self, message: EngineCoreRequest, limits: EngineShape) -> None:
        super().__init__(message, limits)
        self.width = message.sampling_params.beam_width
        self._restart()

    @staticmethod
    def check(message: EngineCoreRequest, limits: EngineShape) -> None:
        """Check the width, and that all beams fit the engine at once."""
        sampling, width = message.sampling_params, message.sampling_params.beam_width
        if not 1 <= sampling.n <= width:
            raise RejectedError(f"n={sampling.n} with beam_width={width}; it must be from 1 to beam_width")
        for name, allowed in _NOT_WITH_BEAMS.items():
            if (value := getattr(sampling, name)) not in allowed:
                raise RejectedError(
                    f"{name}={value!r} has no meaning in a beam search; leave it out, or set beam_width=0"
                )
        check_prompt_only(message, "a beam search")
        check_generation(message, limits)
        most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        if not 1 <= width <= most:
            raise RejectedError(
                f"beam_width={width} is out of range; it must be 0, for no beam search, or from 1 to {most}, the "
                "sequences that the engine runs at a time (--max-num-seqs, --max-num-batched-tokens)"
            )
        stop = set(sampling.stop_token_ids or ()).union(() if sampling.ignore_eos else message.eos_token_ids)
        if (needed := num_candidates(width, len(stop))) > limits.vocab_size:
            raise RejectedError(
                f"beam_width={width} with {len(stop)} stop tokens needs {needed} continuations a step, and the "
                f"vocabulary has {limits.vocab_size} tokens; lower beam_width, or give fewer stop_token_ids"
            )
        num_prompt = len(message.prompt_token_ids)
        total = limits.max_model_len if sampling.max_tokens is None else num_prompt + sampling.max_tokens
        if (pages := limits.pages_of_sequences(num_prompt, total - 1, width)) > limits.num_pages:
            raise RejectedError(
                f"beam_width={width} with a prompt of {num_prompt} tokens and max_tokens={total - num_prompt} may need "
                f"{pages} KV pages, and the engine has {limits.num_pages}; lower beam_width or max_tokens, or start "
                "the engine with more KV memory"
            )
        if 0 < limits.num_states < width:
            raise RejectedError(
                f"beam_width={width} needs as many records of state, and the engine has {limits.num_states}; lower "
                "beam_width, or start the engine with more KV memory"
            )

    def _restart(self) -> None:
        """Go back to the prompt. The same steps follow as before, since nothing is random."""
        self.live: list[Beam] = []
        self.finished: list[Finished] = []  # the best first
        self.length = 0
        self.done = False

    def open(self, request: Request) -> int:
        """Open the sequence of the prompt."""
        self._max_tokens = request.stop.max_total_tokens - request.num_prompt_tokens
        self.num_candidates = num_candidates(self.width, len(request.stop.token_ids))
        return self._open(request)

    def _open(self, request: Request, token_ids: list[int] | None = None) -> int:
        """Open a sequence that samples any token: the search replaces it by one of the candidates."""
        config = sampling_config(request)
        config.temperature, config.logprobs = 0.0, self.num_candidates
        return open_sequence(request, token_ids, sampling=config)

    def begin(self, request: Request) -> None:
        """Start with one beam, which is the prompt."""
        self.live = [Beam(0.0, None, request.slot, request.slot)]

    def slots(self, request: Request) -> list[int]:
        """Beams that are still to be forked have none."""
        if self.live:
            return [beam.slot for beam in self.live if beam.slot is not None]
        return [] if request.slot == NO_SLOT else [request.slot]

    def pages_lacked(self, request: Request, steps: int) -> int:
        """Count the beams that are still to be forked too: they need all that the prompt's full pages do not hold."""
        slots = self.slots(request)
        lacked = request.sequences.pages_lacked(slots, [request.num_tokens + steps - 1] * len(slots))
        to_fork = self._limits.pages_for(request.num_tokens) - request.num_computed_tokens // self._limits.block_size
        return lacked + (len(self.live) - len(slots)) * to_fork

    def states_lacked(self, request: Request) -> int:
        """Count the beams that are still to be forked."""
        return len(self.live) - len(self.slots(request))

    def reserve(self, request: Request, executor: Executor) -> bool:
        """Fork the beams that have no sequence yet."""
        for beam in self.live:
            if beam.slot is None:
                source = beam.source
                tokens = [*request.sequences.tokens(source)[:-1], beam.token_id]
                beam.slot = beam.source = self._open(request, tokens)
                done = executor.fork(beam.slot, source, request.num_computed_tokens, request.num_tokens)
            else:
                done = request.sequences.reserve(beam.slot, request.num_tokens)
            if not done:
                return False
        return True

    def take(self, request: Request, row: int, outcome: StepOutcome) -> EngineCoreOutput | None:
        """Move all beams on by a token. The client gets nothing before the end of the search."""
        if not outcome.token_ids[row]:  # amid the prompt
            return None
        self._advance(request, [entry for i in range(len(self.live)) for entry in outcome.logprobs(row + i) or ()])
        request.num_tokens += 1
        if request.num_output_tokens == 1:
            request.record(EventType.FIRST_TOKEN, outcome.now)
        if not self.done:
            request.slot = self.live[0].source
            return None
        best, *_ = beams = [_to_message(request, finished) for finished in self.finished[: request.sampling.n]]
        output = EngineCoreOutput(request.request_id, stop_reason=best.stop_reason, beams=beams)
        outcome.ended.append((request, output))
        return request.conclude(output, best.finish_reason, outcome.now)

    def preempt(self, request: Request) -> int:
        """Begin again with the prompt."""
        num_lost = request.num_computed_tokens + (len(self.live) - 1) * request.num_output_tokens
        self.close(request)
        request.num_tokens = request.num_prompt_tokens
        self._restart()
        return num_lost

    def _advance(self, request: Request, entries: Sequence[LogprobsEntry]) -> None:
        """Take one step for all beams: `entries` are the `num_candidates` likeliest tokens after each live beam."""
        self.length += 1
        best = heapq.nlargest(self.num_candidates, self._candidates(entries), key=lambda candidate: candidate.logprob)
        at_end = self.length >= self._max_tokens
        stops = [at_end or candidate.token_id in request.stop.token_ids for candidate in best]
        for candidate, stop in zip(best[: self.width], stops, strict=False):
            if stop:
                self._finish(request, candidate)
        followers = [candidate for candidate, stop in zip(best, stops, strict=True) if not stop][: self.width]
        self.done = at_end or (len(self.finished) == self.width and not self._goes_on(request.sampling, followers[0]))
        if not self.done:
            self._follow(request, followers)

    def _candidates(self, entries: Sequence[LogprobsEntry]) -> list[Candidate]:
        return [
            Candidate(beam.logprob + entry[1][rank], beam, entry, rank)
            for beam, entry in zip(self.live, entries, strict=True)
            for rank in range(1, self.num_candidates + 1)
        ]

    def _finish(self, request: Request, candidate: Candidate) -> None:
        score = candidate.logprob / self.length**request.sampling.length_penalty
        stopped = candidate.token_id in request.stop.token_ids
        path = candidate.path(request.sampling.logprobs or 0)
        self.finished.append(Finished(score, candidate.logprob, path, stopped))
        self.finished.sort(key=lambda finished: -finished.score)
        del self.finished[self.width :]

    def _goes_on(self, sampling: SamplingParams, best: Candidate) -> bool:
        """Return True if `best` may still beat a finished one; `transformers` guesses its final length like this."""
        if sampling.early_stopping is True:
            return False
        far = sampling.early_stopping == "never" and sampling.length_penalty > 0
        length = self._max_tokens if far else self.length
        return bool(best.logprob / length**sampling.length_penalty > self.finished[-1].score)

    def _follow(self, request: Request, followers: list[Candidate]) -> None:
        """Give a beam's slot to its first follower; others are to fork from it; close beams without a follower."""
        sequences, num_logprobs = request.sequences, request.sampling.logprobs or 0
        taken: set[int] = set()
        live = []
        for candidate in followers:
            source = candidate.beam.source  # which is the beam's own slot: it has run
            path = candidate.path(num_logprobs)
            live.append(Beam(candidate.logprob, path, None if source in taken else source, source))
            if source not in taken:
                num_kept = sequences.num_tokens(source) - 1  # without the sampled token
                sequences.truncate(source, num_kept, recompute_last=False)
                sequences.append(source, candidate.token_id)
                taken.add(source)
        for beam in self.live:
            if beam.slot is not None and beam.slot not in taken:
                sequences.close(beam.slot)
        self.live = live


def _to_message(request: Request, finished: Finished) -> BeamSequence:
    entries = []
    link: Link | None = finished.path
    while link is not None:
        entries.append(link.entry)
        link = link.before
    entries.reverse()
    token_ids = [entry.token_ids[0] for entry in entries]
    if not finished.stopped:
        return BeamSequence(token_ids, entries, finished.logprob, FinishReason.LENGTH)
    stop_reason = None if token_ids[-1] in request.stop.eos_token_ids else token_ids[-1]
    return BeamSequence(token_ids, entries, finished.logprob, FinishReason.STOP, stop_reason)
