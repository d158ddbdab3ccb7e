"""Embedding requests: a prompt becomes one vector, and no token is generated."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.frontend.client.observer import RequestOptions
from quire.frontend.client.request import note_events
from quire.frontend.errors import CONTEXT_LENGTH_EXCEEDED, RequestError, RequestTimeoutError
from quire.frontend.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestMetrics
from quire.frontend.text.prompts import Prompt
from quire.protocol.messages import EngineCoreOutput, ErrorKind, FinishReason, PoolingParams, SamplingParams

__all__ = ["EmbeddingRequest", "PoolingParams", "check_embedding", "validate_pooling"]

_TYPES: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(PoolingParams)}


def validate_pooling(params: PoolingParams | None, hidden_size: int) -> PoolingParams:
    """Check the parameters; None stands for the defaults.

    Raises `TypeError`, or `ValueError` with the field, the given value and the allowed ones.
    """
    if params is None:
        return PoolingParams()
    if not isinstance(params, PoolingParams):
        raise TypeError(f"pooling_params is a {type(params).__name__}; give a PoolingParams")
    if params.pooling_type not in ("last", "mean"):
        raise ValueError(f"pooling_type={params.pooling_type!r} is not known; it can be 'last' or 'mean'")
    for name, expected in _TYPES.items():
        try:
            msgspec.convert(getattr(params, name), expected)
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}={getattr(params, name)!r} can't be used: {error}") from None
    if params.dimensions is not None and not 1 <= params.dimensions <= hidden_size:
        raise ValueError(
            f"dimensions={params.dimensions} is out of range; the model's embeddings have {hidden_size} values, so it "
            f"must be from 1 to {hidden_size}, or None for all"
        )
    return params


def check_embedding(num_prompt_tokens: int, max_model_len: int, pool_tokens: int) -> None:
    """Raise `RequestError` if the prompt does not fit the context, or the `pool_tokens` of the KV memory."""
    if num_prompt_tokens > max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens, and this model's maximum context length is {max_model_len} "
            f"tokens; shorten it to {max_model_len} or less",
            code=CONTEXT_LENGTH_EXCEEDED,
        )
    if num_prompt_tokens > pool_tokens:
        raise RequestError(
            f"a prompt of {num_prompt_tokens} tokens can never be served: the engine's KV pages hold {pool_tokens}; "
            f"shorten it to {pool_tokens} or less, or start the engine with more KV memory",
            code=CONTEXT_LENGTH_EXCEEDED,
        )


class EmbeddingRequest:
    """An embedding request: when it is `finished`, it has its embedding or the error that ended it."""

    params = None
    num_output_tokens = longest_output = 0

    def __init__(
        self, request_id: str, prompt: Prompt, params: PoolingParams, *, arrival_time: float, options: RequestOptions
    ) -> None:
        self.request_id = request_id
        self.options = options
        self.prompt = prompt
        self.pooling: PoolingParams | None = params
        self.engine_params: Sequence[SamplingParams] = (SamplingParams(),)
        self.metrics = RequestMetrics(arrival_time)
        self.error: Exception | None = None
        self._vector: list[float] | None = None
        self.first_chunk_time: float | None = None
        self.num_cached_tokens = 0

    @property
    def finished(self) -> bool:
        """True if the embedding has arrived, or an error has ended the request."""
        return self._vector is not None or self.error is not None

    @property
    def finish_reasons(self) -> list[str]:
        """A list of one reason, "stop" if the embedding has arrived."""
        return [str(FinishReason.ABORT if self._vector is None else FinishReason.STOP)]

    def append(self, _index: int, output: EngineCoreOutput, timestamp: float) -> bool:
        """Take an output of the engine; return False, since the engine knows that it has ended."""
        note_events(self.metrics, output.events)
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.pooled is not None:
            self._vector = list(struct.unpack(f"<{len(output.pooled) // 4}f", output.pooled))
        elif output.finish_reason is not None:
            self.error = _explain(output)
        if self.finished:
            self.metrics.finished_time = output.events[-1].timestamp if output.events else timestamp
        return False

    def output(self) -> EmbeddingRequestOutput:
        """Return the embedding. Raises the error that ended the request."""
        if self._vector is None:
            raise self.error or RuntimeError(f"request {self.request_id!r} has not ended")
        return EmbeddingRequestOutput(
            self.request_id,
            self.prompt.text,
            self.prompt.token_ids,
            EmbeddingOutput(self._vector),
            self.finished,
            self.metrics,
            self.num_cached_tokens,
        )


def _explain(output: EngineCoreOutput) -> RequestError:
    """Return the reason why there is no vector; a partial embedding is useless, so abort and timeout are errors too."""
    if output.finish_reason is FinishReason.ABORT:
        return RequestError("the request was aborted before its embedding was computed", kind=ErrorKind.FAILED)
    if output.finish_reason is FinishReason.TIMEOUT:
        return RequestTimeoutError(output.error or "the request timed out", kind=ErrorKind.FAILED)
    return RequestError(output.error or "the engine reported no reason", kind=output.error_kind or ErrorKind.FAILED)
