"""Metrics of the requests that this frontend has submitted."""

from __future__ import annotations

from quire.frontend.client.observer import OpenRequest
from quire.frontend.errors import RequestError, RequestTimeoutError
from quire.frontend.metrics import prometheus
from quire.frontend.metrics.adapters import AdapterMeter
from quire.frontend.metrics.prometheus import Families
from quire.protocol.messages import ErrorKind, FinishReason
from quire.protocol.totals import Distribution

_REJECTIONS = {
    ErrorKind.OVERLOADED: "queue_full",
    ErrorKind.SHUTTING_DOWN: "shutting_down",
    ErrorKind.INVALID: "invalid",
    ErrorKind.UNAVAILABLE: "unavailable",
}

_REASONS = ("error", "timeout", "abort", "length", "stop")  # the worst first


class RequestMeter:
    """An `Observer` that measures requests: counts, tokens and times.

    Latencies that users see (TTFT, ITL, TPOT, end to end) are measured by this process's clock, when frames arrive
    here; phases in the engine (queue, prefill, decode, inference) by the engine's clock. Times of different clocks are
    never subtracted, so that an engine on another machine is measured correctly.

    ITL is vLLM's of this name: the gap between two increments of a completion, which contain several tokens with drafts
    that held, or if this process was slow; tokens that came with the one before are counted. For a request with several
    completions, TPOT is that of the longest and `request_generation_tokens` that of all together.
    A request is counted once, when it ends, by the worst finish reason of its completions; a rejected request is
    counted as rejected and nowhere else. An embedding has a prompt and a queue time, but generates no tokens. The times
    of a request that failed or was aborted are observed as far as it got.
    """

    def __init__(self, max_model_len: int) -> None:
        self.adapters = AdapterMeter()
        lengths = prometheus.one_two_five(max_model_len)
        self._max_model_len = max_model_len
        self._in_flight = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._generation_tokens = self._tokens_together = 0
        self._finished = dict.fromkeys(_REASONS, 0)
        self._rejected = dict.fromkeys(_REJECTIONS.values(), 0)
        self._time_to_first_token = Distribution.of(prometheus.TIME_TO_FIRST_TOKEN)
        self._inter_token_latency = Distribution.of(prometheus.TIME_PER_TOKEN_FINE)
        self._time_per_output_token = Distribution.of(prometheus.TIME_PER_TOKEN)
        self._end_to_end = Distribution.of(prometheus.REQUEST_TIME)
        self._queue = Distribution.of(prometheus.REQUEST_TIME_FINE)
        self._inference = Distribution.of(prometheus.REQUEST_TIME)
        self._prefill = Distribution.of(prometheus.REQUEST_TIME)
        self._decode = Distribution.of(prometheus.REQUEST_TIME)
        self._prompt_lengths = Distribution.of(lengths)
        self._generation_lengths = Distribution.of(lengths)
        self._max_tokens = Distribution.of(lengths)
        self._n = Distribution.of(prometheus.NUM_COMPLETIONS)
        self._preemptions = Distribution.of(prometheus.NUM_PREEMPTIONS)

    def count_rejected(self, reason: str) -> None:
        """Count a request that was rejected before it was submitted; `reason` is one of a few fixed words."""
        self._rejected[reason] = self._rejected.get(reason, 0) + 1

    def on_submitted(self, request: OpenRequest) -> None:
        """See `Observer`."""
        self._in_flight += 1
        self.adapters.begin(request)

    def on_first_tokens(self, request: OpenRequest, timestamp: float) -> None:
        """See `Observer`; the prompt has been computed."""
        self._time_to_first_token.observe(timestamp - request.metrics.arrival_time)
        self._count_prompt(request)

    def on_tokens(self, num_tokens: int, num_together: int, gaps: list[float], timestamp: float) -> None:
        """See `Observer`."""
        del timestamp
        self._generation_tokens += num_tokens
        self._tokens_together += num_together
        self._inter_token_latency.observe_all(gaps)

    def on_finished(self, request: OpenRequest, timestamp: float) -> None:
        """See `Observer`."""
        self._in_flight -= 1
        self.adapters.end(request)
        if (rejection := _rejection(request)) is not None:
            self.count_rejected(rejection)
            return
        reason = _reason(request)
        self._finished[reason] += 1
        if request.params is None and reason == str(FinishReason.STOP):
            self._count_prompt(request)  # its prompt was computed
        self._observe_request(request)
        self._observe_times(request, timestamp)

    def add_to(self, families: Families) -> None:
        """Add all metrics."""
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
        add.gauge("requests_in_flight", "Open requests of this frontend.", self._in_flight)
        add.counter("prompt_tokens", "Prompt tokens, computed or cached.", self._prompt_tokens)
        add.counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", self._cached_tokens)
        add.counters("prompt_tokens_by_source", "Prompt tokens by source.", ("source",), sources.items())
        add.counter("generation_tokens", "Generated tokens.", self._generation_tokens)
        text = "Generated tokens that came in one increment with the token before."
        add.counter("generation_tokens_together", text, self._tokens_together)
        add.counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", self._prompt_tokens)
        add.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", self._cached_tokens)
        reasons = [((reason,), count) for reason, count in self._finished.items()]
        add.counters("request_success", "Ended requests by finish reason.", ("finished_reason",), reasons)
        rejections = [((reason,), count) for reason, count in self._rejected.items()]
        add.counters("admission_rejections", "Rejected requests by reason.", ("reason",), rejections)

    def _add_times(self, add: Families) -> None:
        add.histogram("time_to_first_token_seconds", "From the request to its first token.", self._time_to_first_token)
        itl, text = self._inter_token_latency, "Gap between two increments of a completion."
        add.histogram("inter_token_latency_seconds", text, itl, prometheus.TIME_PER_TOKEN)
        add.histogram("inter_token_latency_fine_seconds", text, itl)
        text = "(End to end - time to first token) / (output tokens - 1)."
        add.histogram("request_time_per_output_token_seconds", text, self._time_per_output_token)
        add.histogram("e2e_request_latency_seconds", "Time from sending a request to its end.", self._end_to_end)
        text = "Time in the queue, until first scheduled."
        add.histogram("request_queue_time_seconds", text, self._queue, prometheus.REQUEST_TIME)
        add.histogram("request_queue_time_fine_seconds", text, self._queue)
        add.histogram("request_inference_time_seconds", "First scheduled to last token.", self._inference)
        add.histogram("request_prefill_time_seconds", "First scheduled to first token.", self._prefill)
        add.histogram("request_decode_time_seconds", "First token to last token.", self._decode)

    def _add_sizes(self, add: Families) -> None:
        add.histogram("request_prompt_tokens", "Prompt tokens of a request.", self._prompt_lengths)
        add.histogram(
            "request_generation_tokens", "Generated tokens of a request, all completions.", self._generation_lengths
        )
        add.histogram("request_params_max_tokens", "max_tokens, or the rest of the context.", self._max_tokens)
        add.histogram("request_params_n", "Completions of a request.", self._n)
        add.histogram("request_num_preemptions", "Preemptions of a request.", self._preemptions)


def _reason(request: OpenRequest) -> str:
    if isinstance(request.error, RequestTimeoutError):  # of an embedding
        return str(FinishReason.TIMEOUT)
    if request.error is not None:
        return str(FinishReason.ERROR)
    return min(request.finish_reasons, key=_REASONS.index)


def _rejection(request: OpenRequest) -> str | None:
    """Return the reason why the engine rejected a request, None if it did not."""
    error, is_accepted = request.error, request.metrics.queued_time is not None
    return None if is_accepted or not isinstance(error, RequestError) else _REJECTIONS.get(error.kind)
