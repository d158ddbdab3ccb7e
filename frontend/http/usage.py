"""Token counts for the `usage` of an answer."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.text.chat.events import Event, ReasoningDelta
from quire.frontend.text.tokenizer import Tokenizer


class PromptTokensDetails(msgspec.Struct):
    """`cached_tokens`: prompt tokens found in the prefix cache."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    """`reasoning_tokens`: tokens of the answer's thoughts.

    With a `prediction`, those of the answer that came from it, and those of it that were tried in vain.
    """

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET


class CompletionUsage(msgspec.Struct, omit_defaults=True):
    """OpenAI's `usage`; `completion_tokens_details` is there if the model thought, or with a `prediction`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


def usage_of(outputs: Iterable[RequestOutput]) -> CompletionUsage:
    """Return the usage of complete answers; a prompt counts once, however many completions it has."""
    tally = TokenTally()
    for index, output in enumerate(outputs):
        tally.add(index, output)
    return tally.usage


class TokenTally:
    """Adds up the tokens of several prompts' outputs, complete ones or deltas."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}  # by prompt: its tokens, and how many were cached
        self._completion_tokens = 0
        self._accepted = self._rejected = 0  # drafts

    def add(self, index: int, output: RequestOutput) -> None:
        """Add an output of prompt `index`."""
        self._prompts[index] = (len(output.prompt_token_ids), output.num_cached_tokens)
        for completion in output.outputs:
            self._add(completion)

    def add_delta(self, output: RequestOutput, completion: CompletionOutput) -> None:
        """Add a delta of one completion of the only prompt."""
        self._prompts[0] = (len(output.prompt_token_ids), output.num_cached_tokens)
        self._add(completion)

    def _add(self, completion: CompletionOutput) -> None:
        self._completion_tokens += len(completion.token_ids)
        if completion.finish_reason is not None:
            self._accepted += completion.num_accepted_drafts
            self._rejected += completion.num_rejected_drafts

    def add_predictions_to(self, usage: CompletionUsage) -> CompletionUsage:
        """Return `usage` with what became of a prediction."""
        details = usage.completion_tokens_details = usage.completion_tokens_details or CompletionTokensDetails()
        details.accepted_prediction_tokens, details.rejected_prediction_tokens = self._accepted, self._rejected
        return usage

    @property
    def usage(self) -> CompletionUsage:
        """The usage so far."""
        prompt_tokens = sum(tokens for tokens, _ in self._prompts.values())
        cached = sum(cached for _, cached in self._prompts.values())
        total = prompt_tokens + self._completion_tokens
        return CompletionUsage(prompt_tokens, self._completion_tokens, total, PromptTokensDetails(cached))


class Thoughts:
    """Collects the thoughts of answers, to count their tokens from the text: a delta may hold the end of a thought."""

    def __init__(self) -> None:
        self._texts: dict[int, list[str]] = {}  # by completion

    def add(self, index: int, text: str) -> None:
        """Add a piece of the thoughts of completion `index`."""
        self._texts.setdefault(index, []).append(text)

    def add_events(self, index: int, events: Iterable[Event]) -> None:
        """Add the thoughts among `events`."""
        for event in events:
            if isinstance(event, ReasoningDelta):
                self.add(index, event.text)

    def count(self, tokenizer: Tokenizer | None, usage: CompletionUsage) -> int:
        """Return the number of their tokens; at most the completion's, since a text may be split into more tokens."""
        texts = map("".join, self._texts.values())
        if tokenizer is None:
            return 0
        tokens = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return min(tokens, usage.completion_tokens)

    def added_to(self, usage: CompletionUsage, tokenizer: Tokenizer | None) -> CompletionUsage:
        """Return `usage`, with its details if there were thoughts."""
        if self._texts:
            usage.completion_tokens_details = CompletionTokensDetails(self.count(tokenizer, usage))
        return usage
