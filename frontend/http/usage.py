"""Counts tokens for the `usage` of an answer."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from quire.frontend.outputs import CompletionOutput, RequestOutput


class PromptTokensDetails(msgspec.Struct):
    """`cached_tokens`: of the prompt, those found in the prefix cache."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    """`reasoning_tokens`: of the answer, those of its thoughts."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, omit_defaults=True):
    """OpenAI's `usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


def usage_of(outputs: Iterable[RequestOutput]) -> Usage:
    """The usage of whole answers; a prompt counts once, however many completions it has."""
    tally = Tally()
    for index, output in enumerate(outputs):
        tally.add(index, output)
    return tally.usage


class Tally:
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
    def usage(self) -> Usage:
        """So far."""
        prompt_tokens = sum(tokens for tokens, _ in self._prompts.values())
        cached = sum(cached for _, cached in self._prompts.values())
        total = prompt_tokens + self._completion_tokens
        return Usage(prompt_tokens, self._completion_tokens, total, PromptTokensDetails(cached))
