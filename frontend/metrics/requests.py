"""Metrics of the requests that this frontend has submitted."""

from __future__ import annotations

from quire.frontend.client.observer import OpenRequest
from quire.frontend.errors import RequestError, RequestTimeoutError
from quire.frontend.metrics import buckets
from quire.frontend.metrics.families import Families
from quire.protocol.messages import ErrorKind, FinishReason
from quire.protocol.totals import Distribution

_REJECTIONS = {
    ErrorKind.OVERLOADED: "queue_full",
    ErrorKind.SHUTTING_DOWN: "shutting_down",
    ErrorKind.INVALID: "invalid",
}

_REASONS = ("error", "timeout", "abort", "length", "stop")  # the worst first


class RequestMeter:
    """An `Observer` that counts requests, their tokens and their times.

    What a user sees (TTFT, ITL, TPOT, end to end) is measured by this process's clock, when frames arrive here; what
    happens in the engine (queue, prefill, decode, inference) by the engine's. No difference is taken between clocks, so
    all is right with an engine on another machine, too.

    ITL is the gap between two increments of a completion, which hold several tokens if this process was slow. TPOT and
    `request_generation_tokens` of a request with several completions are those of the longest, and of all together.
    A request is counted when it ends, once, by the worst of its completions' reasons; one that was refused is counted
    as rejected and nowhere else. An embedding has a prompt and a time in the queue, but no tokens of its own. Of
    requests that failed or were aborted the times are observed as far as they got.
    """

    def __init__(self, max_model_len: int) -> None:
        lengths = buckets.one_two_five(max_model_len)
        self._max_model_len = max_model_len
        self._in_flight = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._generation_tokens = 0
        self._finished = dict.fromkeys(_REASONS, 0)
        self._rejected = dict.fromkeys(_REJECTIONS.values(), 0)
        self._time_to_first_token = Distribution.of(buckets.TIME_TO_FIRST_TOKEN)
        self._inter_token_latency = Distribution.of(buckets.TIME_PER_TOKEN_FINE)
        self._time_per_output_token = Distribution.of(buckets.TIME_PER_TOKEN)
        self._end_to_end = Distribution.of(buckets.REQUEST_TIME)
        self._queue = Distribution.of(buckets.REQUEST_TIME_FINE)
        self._inference = Distribution.of(buckets.REQUEST_TIME)
        self._prefill = Distribution.of(buckets.REQUEST_TIME)
        self._decode = Distribution.of(buckets.REQUEST_TIME)
        self._prompt_lengths = Distribution.of(lengths)
        self._generation_lengths = Distribution.of(lengths)
        self._max_tokens = Distribution.of(lengths)
        self._n = Distribution.of(buckets.NUM_COMPLETIONS)
        self._preemptions = Distribution.of(buckets.NUM_PREEMPTIONS)

    def rejected(self, reason: str) -> None:
        """Count a request that was refused before it was submitted; `reason` is one of a few fixed words."""
        self._rejected[reason] = self._rejected.get(reason, 0) + 1

    def on_submitted(self, request: OpenRequest) -> None:
        """See `Observer`."""
        del request
        self._in_flight += 1

    def on_first_tokens(self, request: OpenRequest, timestamp: float) -> None:
        """See `Observer`. The prompt has been computed."""
        self._time_to_first_token.observe(timestamp - request.metrics.arrival_time)
        self._count_prompt(request)

    def on_tokens(self, num_tokens: int, gaps: list[float], timestamp: float) -> None:
        """See `Observer`."""
        del timestamp
        self._generation_tokens += num_tokens
        self._inter_token_latency.observe_all(gaps)

    def on_finished(self, request: OpenRequest, timestamp: float) -> None:
        """See `Observer`."""
        self._in_flight -= 1
        if (rejection := _rejection(request)) is not None:
            self.rejected(rejection)
            return
        reason = _reason(request)
        self._finished[reason] += 1
        if request.params is None and reason == str(FinishReason.STOP):
            self._count_prompt(request)  # it is computed when the embedding is there
        self._observe_request(request)
        self._observe_times(request, timestamp)

    def add_to(self, families: Families) -> None:
        """Writes all of them."""
        self._add_counts(families)
        self._add_times(families)
        self._add_sizes(families)

    def _count_prompt(self, request: OpenRequest) -> None:
        self._prompt_tokens += len(request.prompt.token_ids)
        self._cached_tokens += request.num_cached_tokens

    def _observe_request(self, request: OpenRequest) -> None:
        num_prompt_tokens, params = len(request.prompt.token_ids), request.params
        self._preemptions.observe(request.metrics.num_preemptions)
        self._prompt_lengths.observe(num_prompt_tokens)
        if params is None:
            return
        room = self._max_model_len - num_prompt_tokens
        self._generation_lengths.observe(request.num_output_tokens)
        self._max_tokens.observe(room if params.max_tokens is None else params.max_tokens)
        self._n.observe(params.n)

    def _observe_times(self, request: OpenRequest, timestamp: float) -> None:
        times, first, num_gaps = request.metrics, request.first_chunk_time, request.longest_output - 1
        self._end_to_end.observe(timestamp - times.arrival_time)
        if first is not None and num_gaps > 0:
            self._time_per_output_token.observe((timestamp - first) / num_gaps)
        for distribution, begin, end in (
            (self._queue, times.queued_time, times.first_scheduled_time),
            (self._prefill, times.first_scheduled_time, times.first_token_time),
            (self._decode, times.first_token_time, times.last_token_time),
            (self._inference, times.first_scheduled_time, times.last_token_time),
        ):
            if begin is not None and end is not None:
                distribution.observe(end - begin)

    def _add_counts(self, add: Families) -> None:
        computed = self._prompt_tokens - self._cached_tokens
        sources = {("local_compute",): computed, ("local_cache_hit",): self._cached_tokens}
        add.gauge("requests_in_flight", "Requests of this frontend that have not ended.", self._in_flight)
        add.counter("prompt_tokens", "Tokens of prompts that have been computed or found.", self._prompt_tokens)
        add.counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", self._cached_tokens)
        add.counters("prompt_tokens_by_source", "Prompt tokens by where they came from.", ("source",), sources.items())
        add.counter("generation_tokens", "Tokens generated.", self._generation_tokens)
        add.counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", self._prompt_tokens)
        add.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", self._cached_tokens)
        reasons = [((reason,), count) for reason, count in self._finished.items()]
        add.counters("request_success", "Requests that have ended, by why.", ("finished_reason",), reasons)
        rejections = [((reason,), count) for reason, count in self._rejected.items()]
        add.counters("admission_rejections", "Requests that were refused, by why.", ("reason",), rejections)

    def _add_times(self, add: Families) -> None:
        add.histogram("time_to_first_token_seconds", "First tokens - sent.", self._time_to_first_token)
        itl, text = self._inter_token_latency, "Gap between two increments."
        add.histogram("inter_token_latency_seconds", text, itl, buckets.TIME_PER_TOKEN)
        add.histogram("inter_token_latency_fine_seconds", text, itl)
        text = "(End to end - time to first token) / (output tokens - 1)."
        add.histogram("request_time_per_output_token_seconds", text, self._time_per_output_token)
        add.histogram("e2e_request_latency_seconds", "End - sent.", self._end_to_end)
        text = "First scheduled - queued."
        add.histogram("request_queue_time_seconds", text, self._queue, buckets.REQUEST_TIME)
        add.histogram("request_queue_time_fine_seconds", text, self._queue)
        add.histogram("request_inference_time_seconds", "Last token - first scheduled.", self._inference)
        add.histogram("request_prefill_time_seconds", "First token - first scheduled.", self._prefill)
        add.histogram("request_decode_time_seconds", "Last token - first token.", self._decode)

    def _add_sizes(self, add: Families) -> None:
        add.histogram("request_prompt_tokens", "Tokens of the prompt.", self._prompt_lengths)
        add.histogram("request_generation_tokens", "Tokens of all completions.", self._generation_lengths)
        add.histogram("request_params_max_tokens", "max_tokens, or what the context has room for.", self._max_tokens)
        add.histogram("request_params_n", "Completions asked for.", self._n)
        add.histogram("request_num_preemptions", "Preemptions of the request.", self._preemptions)


def _reason(request: OpenRequest) -> str:
    if isinstance(request.error, RequestTimeoutError):  # half an embedding is none
        return str(FinishReason.TIMEOUT)
    if request.error is not None:
        return str(FinishReason.ERROR)
    return min(request.finish_reasons, key=_REASONS.index)


def _rejection(request: OpenRequest) -> str | None:
    """Why the engine did not take it, None if it did."""
    error, taken = request.error, request.metrics.queued_time is not None
    return None if taken or not isinstance(error, RequestError) else _REJECTIONS.get(error.kind)
