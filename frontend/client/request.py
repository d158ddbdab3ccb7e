"""Generation and embedding requests in the frontend: increments of the engine in, outputs out."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec

from quire.frontend.client.logprobs import ArrivedLogprobs
from quire.frontend.client.observer import RequestOptions
from quire.frontend.errors import CONTEXT_LENGTH_EXCEEDED, RequestError, RequestTimeoutError
from quire.frontend.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
)
from quire.frontend.sampling import ranks
from quire.frontend.text.detokenizer import IncrementalDetokenizer, StopStrings
from quire.frontend.text.prompts import Prompt
from quire.frontend.text.tokenizer import Tokenizer
from quire.protocol.messages import (
    EngineCoreEvent,
    EngineCoreOutput,
    ErrorKind,
    EventType,
    FinishReason,
    PoolingParams,
    SamplingParams,
)
from quire.protocol.pooling_info import PoolingInfo
from quire.protocol.pooling_tasks import check_pooling


class CompletionState:
    """The state of one of the `n` completions of a request: tokens, text, logprobs, finish reason."""

    def __init__(
        self,
        index: int,
        logprobs: ArrivedLogprobs | None,
        detokenizer: IncrementalDetokenizer | None,
    ) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.token_ids: list[int] = []
        self._logprobs = logprobs
        self._cumulative_logprob = 0.0
        self._num_output = 0
        self._drafts = 0, 0
        self._detokenizer = detokenizer

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far."""
        return len(self.token_ids)

    @property
    def mean_logprob(self) -> float:
        """Mean log probability of the tokens; minus infinity without tokens."""
        return self._cumulative_logprob / len(self.token_ids) if self.token_ids else -math.inf

    def append(self, output: EngineCoreOutput) -> bool:
        """Take an increment; return True if a stop string ended the completion, which the engine cannot know."""
        token_ids = output.new_token_ids
        stop_string = self._detokenize(output)
        if self._detokenizer is not None:
            token_ids = token_ids[: self._detokenizer.num_tokens - len(self.token_ids)]
        self.token_ids += token_ids
        if self._logprobs is not None and output.new_logprobs is not None:
            entries = output.new_logprobs[: len(token_ids)]
            self._logprobs.add(entries)
            for entry in entries:
                self._cumulative_logprob += entry.logprobs[0]
        if stop_string is not None:
            self.finish_reason, self.stop_reason = str(FinishReason.STOP), stop_string
        elif output.finish_reason is not None:
            self.finish_reason, self.stop_reason = str(output.finish_reason), output.stop_reason
        self._drafts = output.num_accepted_drafts, output.num_rejected_drafts
        return stop_string is not None and output.finish_reason is None

    def reading(self) -> Iterator[None]:
        """Read the log probabilities that have arrived, a position at each step."""
        return iter(()) if self._logprobs is None else self._logprobs.reading()

    def output(self, delta: bool) -> CompletionOutput:
        """Return the completion so far, or with `delta` the part added since the last call."""
        start = self._num_output if delta else 0
        self._num_output = len(self.token_ids)
        text = "" if self._detokenizer is None else self._detokenizer.delta() if delta else self._detokenizer.text
        return CompletionOutput(
            self.index,
            text,
            self.token_ids[start:],
            None if self._logprobs is None else self._cumulative_logprob,
            self._output_logprobs(delta),
            self.finish_reason,
            self.stop_reason,
            *self._drafts,
        )

    def _output_logprobs(self, delta: bool) -> list[PositionLogprobs] | None:
        if self._logprobs is None:
            return None
        positions = self._logprobs.take() if delta else self._logprobs.all()
        if not delta and self.finish_reason is None:
            positions = positions[:]  # it grows on
        return cast("list[PositionLogprobs]", positions)  # the engine sends some for each token

    def _detokenize(self, output: EngineCoreOutput) -> str | None:
        """Update the text; return the stop string that ended it, or None."""
        if self._detokenizer is None:
            return None
        stop_token = output.finish_reason is FinishReason.STOP and not output.is_whole
        stop = self._detokenizer.update(output.new_token_ids, stop_token)
        return self._detokenizer.finish() if stop is None and output.finish_reason is not None else stop


class GenerationRequest:
    """A user's request: its prompt and parameters, its completions, and the error that ended it, if any.

    `params` are checked by `validate`; `engine_params` are those of its engine requests, one for each completion.
    `first_chunk_time` is when its first tokens arrived, on this process's monotonic clock, None without observers.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        engine_params: Sequence[SamplingParams],
        tokenizer: Tokenizer | None,
        *,
        arrival_time: float,
        options: RequestOptions,
    ) -> None:
        self.request_id = request_id
        self.options = options
        self.prompt = prompt
        self.pooling: PoolingParams | None = None
        self.engine_params = engine_params
        self.params = params
        self.metrics = RequestMetrics(arrival_time)
        self.first_chunk_time: float | None = None
        self.num_cached_tokens = 0
        self.error: Exception | None = None
        self._tokenizer = tokenizer
        count = params.n if params.beam_width else len(engine_params)
        has_logprobs = engine_params[0].logprobs is not None
        detokenizer = None if tokenizer is None else _detokenizer(params, prompt, tokenizer)
        self._completions = [
            CompletionState(
                index,
                ArrivedLogprobs(tokenizer) if has_logprobs else None,
                None if detokenizer is None else detokenizer.copy(),
            )
            for index in range(count)
        ]
        self._num_open = count
        self._prompt_logprobs: ArrivedLogprobs | None = None

    @property
    def finished(self) -> bool:
        """True if all completions have ended, or an error has ended them."""
        return self._num_open == 0 or self.error is not None

    @property
    def has_news(self) -> bool:
        """True if there is an output: ranked completions are output only at the end."""
        return self.finished or not ranks(self.params)

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens of all completions."""
        return sum(completion.num_tokens for completion in self._completions)

    @property
    def longest_output(self) -> int:
        """Number of tokens of the longest completion."""
        return max(completion.num_tokens for completion in self._completions)

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reason of each completion; "abort" if its consumer left or an error ended it."""
        return [completion.finish_reason or str(FinishReason.ABORT) for completion in self._completions]

    def append(self, index: int, output: EngineCoreOutput, timestamp: float) -> bool:
        """Take an increment of completion `index`; return True if the engine must be told that it has ended."""
        metrics = self.metrics
        if output.events:
            self._note(output)
            if output.events[-1].type is EventType.FINISHED:
                timestamp = output.events[-1].timestamp  # the frame may have waited for its client, and been merged
        if output.new_token_ids or output.beams:
            metrics.last_token_time = max(timestamp, metrics.last_token_time or timestamp)
        if output.new_prompt_logprobs is not None:
            self._prompt_logprobs = ArrivedLogprobs(self._tokenizer)
            self._prompt_logprobs.add(output.new_prompt_logprobs)
        if self.params.beam_width:
            self._append_beams(output)
            stopped = False
        else:
            completion = self._completions[index]
            stopped = completion.append(output)
            self._num_open -= completion.finish_reason is not None
        if output.finish_reason is FinishReason.ERROR and not stopped:
            kind = output.error_kind or ErrorKind.FAILED
            self.error = RequestError(output.error or "the engine reported no reason", kind=kind)
        if self._num_open == 0:
            metrics.finished_time = max(timestamp, metrics.last_token_time or timestamp)
        return stopped

    def continuation(self, index: int) -> tuple[SamplingParams, list[int]]:
        """Return what engine request `index` still lacks: prompt logprobs come once, and beams only at the end."""
        params = self.engine_params[index]
        generated = [] if params.beam_width else self._completions[index].token_ids
        if generated and params.prompt_logprobs is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return params, generated

    def reading(self) -> Iterator[None]:
        """Read what has arrived, a position of log probabilities at each step; `output` reads what is left."""
        if self._prompt_logprobs is not None:
            yield from self._prompt_logprobs.reading()
        for completion in self._completions:
            yield from completion.reading()

    def output(self, delta: bool = False) -> RequestOutput:
        """Return the request so far; with `delta`, completions contain only the part added since the last call."""
        return RequestOutput(
            self.request_id,
            self.prompt.text,
            self.prompt.token_ids,
            None if self._prompt_logprobs is None else self._prompt_logprobs.all(),
            self._outputs(delta),
            self.finished,
            self.metrics,
            self.num_cached_tokens,
        )

    def _outputs(self, delta: bool) -> list[CompletionOutput]:
        if not ranks(self.params):
            return [completion.output(delta) for completion in self._completions]
        if not self.finished:
            return []
        best = self._completions
        if self.params.best_of is not None:
            best = sorted(best, key=lambda completion: -completion.mean_logprob)[: self.params.n]
        outputs = [completion.output(delta) for completion in best]
        for index, output in enumerate(outputs):
            output.index = index
            if self.params.logprobs is None:
                output.logprobs = None
        return outputs

    def _append_beams(self, output: EngineCoreOutput) -> None:
        """Store each beam as a completion; a search that was ended early has no beams, and they stay empty."""
        if output.finish_reason is None:
            return
        for index, completion in enumerate(self._completions):
            beam = output.beams[index] if output.beams else None
            own = EngineCoreOutput(output.request_id, finish_reason=output.finish_reason)
            if beam is not None:
                own = EngineCoreOutput(
                    output.request_id,
                    beam.token_ids,
                    beam.logprobs,
                    finish_reason=beam.finish_reason,
                    stop_reason=beam.stop_reason,
                )
            completion.append(own)
        self._num_open = 0

    def _note(self, output: EngineCoreOutput) -> None:
        is_first = self.metrics.first_token_time is None
        note_events(self.metrics, output.events)
        if is_first and self.metrics.first_token_time is not None:
            self.num_cached_tokens = output.num_cached_tokens


def note_events(metrics: RequestMetrics, events: Sequence[EngineCoreEvent]) -> None:
    """Record the events of a request, and their times."""
    metrics.events += events
    for event in events:
        if event.type is EventType.QUEUED:
            metrics.queued_time = metrics.queued_time or event.timestamp
        elif event.type is EventType.SCHEDULED:
            metrics.first_scheduled_time = metrics.first_scheduled_time or event.timestamp
        elif event.type is EventType.PREEMPTED:
            metrics.num_preemptions += 1
        elif event.type is EventType.FIRST_TOKEN:
            metrics.first_token_time = metrics.first_token_time or event.timestamp


def _detokenizer(params: SamplingParams, prompt: Prompt, tokenizer: Tokenizer) -> IncrementalDetokenizer | None:
    """Return the detokenizer of an answer, to be copied for each, None for answers without text."""
    if not params.detokenize:
        return None
    return IncrementalDetokenizer(
        tokenizer,
        prompt.token_ids,
        StopStrings(params.stop) if params.stop else None,
        params.include_stop_str_in_output,
        params.skip_special_tokens,
        params.spaces_between_special_tokens,
        params.min_tokens,
    )


__all__ = ["EmbeddingRequest", "PoolingParams", "check_embedding", "validate_pooling"]

_TYPES: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(PoolingParams)}


def validate_pooling(params: PoolingParams | None, model: PoolingInfo, embedding_size: int) -> PoolingParams:
    """Check the parameters; None stands for the defaults.

    Raises `TypeError`, or `ValueError` with the field, the given value and the allowed ones.
    """
    if params is None:
        params = PoolingParams()
    if not isinstance(params, PoolingParams):
        raise TypeError(f"pooling_params is a {type(params).__name__}; give a PoolingParams")
    if params.pooling_type not in (None, "last", "mean", "cls", "max"):
        raise ValueError(
            f"pooling_type={params.pooling_type!r} is not known; it can be 'last', 'mean', 'cls' or 'max', or None for "
            "the model's"
        )
    params = PoolingParams(**{name: getattr(params, name) for name in _TYPES})  # a user's has further fields
    for name, expected in _TYPES.items():
        try:
            msgspec.convert(getattr(params, name), expected)
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}={getattr(params, name)!r} can't be used: {error}") from None
    check_pooling(params, model, embedding_size)
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
    """A request whose prompt is pooled: when it is `finished`, it has its vector or the error that ended it.

    The vector is an embedding, or has a score for each label.
    """

    params = None
    num_output_tokens = longest_output = 0

    def __init__(
        self, request_id: str, prompt: Prompt, params: PoolingParams, *, arrival_time: float, options: RequestOptions
    ) -> None:
        self.request_id = request_id
        self.options = options
        self.prompt = prompt
        if prompt.num_skipped and params.task == "embed":
            params = msgspec.structs.replace(params, num_skipped=prompt.num_skipped)
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

    def continuation(self, index: int) -> tuple[SamplingParams, list[int]]:
        """Return its parameters: it begins again with the prompt."""
        return self.engine_params[index], []

    def classification(self) -> ClassificationRequestOutput:
        """Return the scores of the labels. Raises the error that ended the request."""
        output = self.output()
        probs = ClassificationOutput(output.outputs.embedding)
        return ClassificationRequestOutput(self.request_id, self.prompt.token_ids, probs, metrics=self.metrics)

    def vector(self) -> PoolingRequestOutput:
        """Return the vector, whatever the task. Raises the error that ended the request."""
        output = self.output()
        data = PoolingOutput(output.outputs.embedding)
        return PoolingRequestOutput(self.request_id, self.prompt.token_ids, data)

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
