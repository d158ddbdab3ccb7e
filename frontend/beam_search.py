"""Parameters and results of a beam search; names are vLLM's, meanings those of `transformers`."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.frontend.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from quire.protocol.messages import FinishReason, SamplingParams


class BeamSearchParams(msgspec.Struct, kw_only=True):
    """Parameters of a beam search, which returns its `beam_width` best sequences.

    `length_penalty`: power of a sequence's length that its log probability is divided by. `early_stopping`: True ends
    the search when `beam_width` sequences are finished, False when no other is likely to become better, "never" when
    none can. `temperature` can only be 0. `include_stop_str_in_output`: keep an end-of-sequence token in `tokens`.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    include_stop_str_in_output: bool = False

    def sampling_params(self) -> SamplingParams:
        """Return the parameters of the engine request. Raises `ValueError` for a temperature, or a width below 1."""
        if self.temperature != 0:
            raise ValueError(f"temperature={self.temperature}: a beam search does not sample; it can only be 0")
        if self.beam_width < 1:
            raise ValueError(f"beam_width={self.beam_width}; it must be at least 1")
        return SamplingParams(
            n=self.beam_width,
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=0.0,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            logprobs=0,
        )


class BeamSearchSequence(msgspec.Struct, gc=False):
    """One sequence: `tokens` of the prompt and of the continuation; `logprobs` and `text` of the continuation alone."""

    tokens: list[int]
    logprobs: list[PositionLogprobs]
    cum_logprob: float
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class BeamSearchOutput(msgspec.Struct, gc=False):
    """Sequences of one prompt, the best first."""

    sequences: list[BeamSearchSequence]


def beam_search_output(output: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
    """Return the engine's result in vLLM's form."""
    return BeamSearchOutput([_sequence(output.prompt_token_ids, each, params) for each in output.outputs])


def _sequence(prompt: list[int], found: CompletionOutput, params: BeamSearchParams) -> BeamSearchSequence:
    stopped = found.finish_reason == str(FinishReason.STOP) and not params.include_stop_str_in_output
    token_ids = found.token_ids[:-1] if stopped else found.token_ids
    return BeamSearchSequence(
        [*prompt, *token_ids],
        found.logprobs or [],
        found.cumulative_logprob or 0.0,
        found.text,
        found.finish_reason,
        found.stop_reason,
    )
