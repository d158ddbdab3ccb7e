"""Counts tokens for the `usage` of an answer."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.text.chat.events import Event, ReasoningDelta
from quire.frontend.text.tokenizer import Tokenizer


class PromptTokensDetails(msgspec.Struct):
    """`cached_tokens`: of the prompt, those found in the prefix cache."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    """`reasoning_tokens`: of the answer, those of its thoughts."""

    reasoning_tokens: int = 0


class CompletionUsage(msgspec.Struct, omit_defaults=True):
    """OpenAI's `usage`; the details of the completion are there if the model thought."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


def usage_of(outputs: Iterable[RequestOutput]) -> CompletionUsage:
    """The usage of whole answers; a prompt counts once, however many completions it has."""
    tally = TokenTally()
    for index, output in enumerate(outputs):
        tally.add(index, output)
    return tally.usage


class TokenTally:
    """Adds up the outputs of several prompts, whole ones or deltas."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}  # by prompt: its tokens, and those that were cached
        self._completion_tokens = 0

    def add(self, index: int, output: RequestOutput) -> None:
        """Take what came of prompt `index`."""
        self._prompts[index] = (len(output.prompt_token_ids), output.num_cached_tokens)
        for completion in output.outputs:
            self._completion_tokens += len(completion.token_ids)

    def add_delta(self, output: RequestOutput, completion: CompletionOutput) -> None:
        """Take a delta of one completion of the only prompt."""
        self._prompts[0] = (len(output.prompt_token_ids), output.num_cached_tokens)
        self._completion_tokens += len(completion.token_ids)

    @property
    def usage(self) -> CompletionUsage:
        """So far."""
        prompt_tokens = sum(tokens for tokens, _ in self._prompts.values())
        cached = sum(cached for _, cached in self._prompts.values())
        total = prompt_tokens + self._completion_tokens
        return CompletionUsage(prompt_tokens, self._completion_tokens, total, PromptTokensDetails(cached))


class Thoughts:
    """Gathers the thoughts of answers, to count their tokens from the text: deltas have no boundary where they end."""

    def __init__(self) -> None:
        self._texts: dict[int, list[str]] = {}  # by completion

    def add(self, index: int, text: str) -> None:
        """Take more of what completion `index` thinks."""
        self._texts.setdefault(index, []).append(text)

    def add_events(self, index: int, events: Iterable[Event]) -> None:
        """Take what of `events` is thoughts."""
        for event in events:
            if isinstance(event, ReasoningDelta):
                self.add(index, event.text)

    def count(self, tokenizer: Tokenizer | None, usage: CompletionUsage) -> int:
        """Their tokens; of all that `usage` counts at most, as a text may be cut into more than the model wrote."""
        texts = map("".join, self._texts.values())
        if tokenizer is None:
            return 0
        tokens = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return min(tokens, usage.completion_tokens)

    def added_to(self, usage: CompletionUsage, tokenizer: Tokenizer | None) -> CompletionUsage:
        """`usage` with its details, if there were thoughts."""
        if self._texts:
            usage.completion_tokens_details = CompletionTokensDetails(self.count(tokenizer, usage))
        return usage
