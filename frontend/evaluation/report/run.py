"""Collector of a run's measurements."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from datetime import datetime
from typing import Any

import numpy as np

from quire.frontend.evaluation.replay.record import Outcome, RequestRecord, TargetSample
from quire.frontend.evaluation.report.aggregates import Downsampled, EngineShare, RequestColumns
from quire.frontend.evaluation.report.goodput import GoodputLimits
from quire.frontend.evaluation.report.quantiles import (
    ExactDistribution,
    Floats,
    PooledDistribution,
    ValueDistribution,
    WithZeros,
)
from quire.frontend.evaluation.report.rates import TokenRate

_MOST_SHOWN_REQUESTS = 300
_MOST_SHOWN_SAMPLES = 2000
_MOST_SHOWN_ERRORS = 100
_ERROR_LENGTH = 500

ShownRequest = tuple[Outcome, int, int, list[tuple[str, float, float]]]
"""A request in the page's Gantt chart: its outcome, prompt tokens, output tokens, and phases."""


class Run:
    """The records and samples of a run, a million of either in bounded memory, unless `detailed`.

    `config` says how the run was made; all of it is in the report. These keys have vLLM's names: `backend`, `model_id`,
    `request_rate` (requests a second), `burstiness`, `max_concurrency`. `simulated` is true for a simulation, `engines`
    is the number of engines, and `date` (YYYYmmdd-HHMMSS) replaces the time of construction. `detailed` keeps the
    lengths, times and errors of every request.
    """

    def __init__(
        self, title: str, config: dict[str, Any], *, goodput: GoodputLimits | None = None, detailed: bool = False
    ) -> None:
        self.title = title
        self.config = config
        self.date = str(config.get("date") or datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"))
        self.goodput = goodput
        self.details = RequestColumns() if detailed else None
        self.seconds: float | None = None
        self.interrupted: str | None = None
        self.steal: float | None = None

        self.warm_up = 0
        self.warm_up_failed = 0  # of these
        self.outcomes: Counter[Outcome] = Counter()
        self.errors: Counter[tuple[str, str]] = Counter()
        self.preemptions = 0
        self.short_answers = 0  # that completed with fewer tokens than requested
        self.met: Counter[str] = Counter()  # requests that meet each limit, and all of them ("all")
        self.prompt_tokens = 0  # these three are of completed requests
        self.output_tokens = 0
        self.cached_tokens: int | None = None  # None if the target reports none
        self.partial_tokens = 0  # of answers that did not complete
        self.engines: defaultdict[int, EngineShare] = defaultdict(EngineShare)

        self.lags = ExactDistribution()
        self.latencies: dict[str, ExactDistribution] = {
            name: ExactDistribution() for name in ("ttft", "tpot", "e2el", "queue", "prefill", "decode")
        }
        self.gaps = PooledDistribution()
        self.token_latencies = WithZeros(self.gaps)
        self.output_rate = TokenRate()
        self.prompt_rate = TokenRate()
        self._sent = array("d")
        self._ended = array("d")
        self.shown: Downsampled[ShownRequest] = Downsampled(_MOST_SHOWN_REQUESTS)
        self._samples: Downsampled[TargetSample] = Downsampled(_MOST_SHOWN_SAMPLES)
        self._last_sample: TargetSample | None = None
        self._sample_count = 0

    def add(self, record: RequestRecord) -> None:
        """Take a request that has ended in any way. A warm-up request is counted, but is in no other figure."""
        if record.is_warm_up:
            self.warm_up += 1
            self.warm_up_failed += record.outcome is not Outcome.COMPLETED
            return
        self.outcomes[record.outcome] += 1
        self.preemptions += record.num_preemptions
        self.short_answers += record.is_short
        if record.was_sent:
            self._note_sending(record)
        self._count_tokens(record)
        self._judge(record)
        if record.outcome is Outcome.COMPLETED:
            self._measure(record)
        elif record.error is not None:
            self._note_error(record.outcome, record.error)
        if self.shown.wants(record.index):
            self.shown.add(
                record.index, (record.outcome, record.prompt_tokens, record.output_tokens, shown_phases(record))
            )
        if self.details is not None:
            self.details.add(record)

    def sample(self, sample: TargetSample) -> None:
        """Take a sample of the target's state."""
        self._samples.add(self._sample_count, sample)
        self._sample_count += 1
        self._last_sample = sample

    def end(self, seconds: float, interrupted: str | None = None, *, steal: float | None = None) -> None:
        """End the run `seconds` after it began; `interrupted` says what ended it early.

        `steal` is the share of the host's CPU time that other guests of its hypervisor had.
        """
        self.seconds = seconds
        self.interrupted = interrupted
        self.steal = steal

    @property
    def requests(self) -> int:
        """Number of requests without the warm-up."""
        return self.outcomes.total()

    @property
    def distributions(self) -> dict[str, ValueDistribution]:
        """Distributions of completed requests, by the metric's name, in seconds."""
        one = self.latencies
        return {"ttft": one["ttft"], "tpot": one["tpot"], "itl": self.token_latencies, "gap": self.gaps, **one}

    @property
    def samples(self) -> list[TargetSample]:
        """Samples, evenly downsampled, and the last one."""
        kept = [sample for _, sample in self._samples.items()]
        if self._last_sample is not None and kept[-1] is not self._last_sample:
            kept.append(self._last_sample)
        return kept

    @property
    def sent(self) -> Floats:
        """Seconds at which each request was sent."""
        return np.array(self._sent)

    @property
    def ended(self) -> Floats:
        """Seconds at which each request ended."""
        return np.array(self._ended)

    def _note_sending(self, record: RequestRecord) -> None:
        self.engines[record.engine].add(record)
        self.lags.add(record.lag)
        self._sent.append(record.sent)
        self._ended.append(max(record.sent, record.ended, record.last_token or 0.0))

    def _count_tokens(self, record: RequestRecord) -> None:
        if record.outcome is Outcome.COMPLETED:
            self.prompt_tokens += record.prompt_tokens
            self.output_tokens += record.output_tokens
            if record.cached_tokens is not None:
                self.cached_tokens = (self.cached_tokens or 0) + record.cached_tokens
        else:
            self.partial_tokens += record.output_tokens
        if record.first_token is None:
            return
        self.prompt_rate.add(record.first_token, record.prompt_tokens)
        if record.gaps:
            self.output_rate.add_chunks(record.first_token, record.gaps, record.output_tokens)
        else:
            self.output_rate.add(record.first_token, record.output_tokens)

    def _judge(self, record: RequestRecord) -> None:
        if self.goodput is not None:
            met = self.goodput.met(record)
            self.met.update(met)
            self.met["all"] += len(met) == len(self.goodput.stated)

    def _measure(self, record: RequestRecord) -> None:
        seconds = {
            "ttft": record.ttft,
            "tpot": record.tpot,
            "e2el": record.e2e,
            "queue": record.queue_time,
            "prefill": record.prefill_time,
        }
        if record.first_token is not None and record.last_token is not None:
            seconds["decode"] = record.last_token - record.first_token
        for name, value in seconds.items():
            if value is not None:
                self.latencies[name].add(value)
        self.gaps.extend(record.gaps)
        self.token_latencies.zeros += record.num_together

    def _note_error(self, outcome: Outcome, error: str) -> None:
        key = (outcome.value, error[:_ERROR_LENGTH])
        if key not in self.errors and len(self.errors) >= _MOST_SHOWN_ERRORS:
            key = (outcome.value, "other errors")
        self.errors[key] += 1


def shown_phases(record: RequestRecord) -> list[tuple[str, float, float]]:
    """Return the phases of the target, or else those that the client saw: time to the first token, then decode."""
    if record.phases or record.first_token is None or record.last_token is None:
        return [*record.phases]
    first = record.first_token
    return [("first token", record.sent, first), ("decode", first, record.last_token)]
