"""Collects what the requests of a run have felt."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from datetime import datetime
from typing import Any

import numpy as np

from quire.frontend.evaluation.replay.record import Outcome, RequestRecord, Sample
from quire.frontend.evaluation.report.details import Details
from quire.frontend.evaluation.report.engine_share import EngineShare
from quire.frontend.evaluation.report.goodput import GoodputLimits
from quire.frontend.evaluation.report.quantiles import Distribution, Exact, Floats, Pooled
from quire.frontend.evaluation.report.rates import TokenRate
from quire.frontend.evaluation.report.spans import prefill_seconds, queue_seconds
from quire.frontend.evaluation.report.thinning import Thinned

_SHOWN_REQUESTS = 300
_SHOWN_SAMPLES = 2000
_SHOWN_ERRORS = 100
_ERROR_LENGTH = 500

Shown = tuple[Outcome, int, int, list[tuple[str, float, float]]]
"""Of a request that the page draws: its outcome, tokens of its prompt and its answer, and its phases."""


class Run:
    """Takes the records and samples of a run, a million of either in bounded memory, unless `detailed`.

    `config` says how the run was made; all of it is in the report. These of its keys are named as vLLM names them:
    `backend`, `model_id`, `request_rate` (requests a second), `burstiness`, `max_concurrency`; `simulated` is true of
    a simulation, `engines` is how many served it, and `date` (YYYYmmdd-HHMMSS) replaces the time at which the Run was
    made. `detailed` keeps the lengths, times and errors of every request.
    """

    def __init__(
        self, title: str, config: dict[str, Any], *, goodput: GoodputLimits | None = None, detailed: bool = False
    ) -> None:
        self.title = title
        self.config = config
        self.date = str(config.get("date") or datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"))
        self.goodput = goodput
        self.details = Details() if detailed else None
        self.seconds: float | None = None
        self.interrupted: str | None = None
        self.stolen: float | None = None

        self.warm_up = 0
        self.warm_up_failed = 0  # of these, however they did not complete
        self.outcomes: Counter[Outcome] = Counter()
        self.errors: Counter[tuple[str, str]] = Counter()
        self.preemptions = 0
        self.short_answers = 0  # that completed with fewer tokens than they were to have
        self.met: Counter[str] = Counter()  # requests that meet each limit, and "all" of them
        self.prompt_tokens = 0  # these three of what completed
        self.output_tokens = 0
        self.cached_tokens: int | None = None  # if any of them was told of
        self.partial_tokens = 0  # of answers that did not
        self.engines: defaultdict[int, EngineShare] = defaultdict(EngineShare)

        self.lags = Exact()
        self.latencies: dict[str, Exact] = {
            name: Exact() for name in ("ttft", "tpot", "e2el", "queue", "prefill", "decode")
        }
        self.gaps = Pooled()
        self.output_rate = TokenRate()
        self.prompt_rate = TokenRate()
        self._sent = array("d")
        self._ended = array("d")
        self.shown: Thinned[Shown] = Thinned(_SHOWN_REQUESTS)
        self._samples: Thinned[Sample] = Thinned(_SHOWN_SAMPLES)
        self._last_sample: Sample | None = None
        self._sample_count = 0

    def add(self, record: RequestRecord) -> None:
        """Take a request that has ended, however it did. A warm-up is counted and in no figure."""
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

    def sample(self, sample: Sample) -> None:
        """Take what the target told of itself at one moment."""
        self._samples.add(self._sample_count, sample)
        self._sample_count += 1
        self._last_sample = sample

    def end(self, seconds: float, interrupted: str | None = None, *, stolen: float | None = None) -> None:
        """End the run `seconds` after it began; `interrupted` says what ended it before its time.

        `stolen` is the part of the CPU time of the host of the run that others on its hypervisor had.
        """
        self.seconds = seconds
        self.interrupted = interrupted
        self.stolen = stolen

    @property
    def requests(self) -> int:
        """How many there were, but for warm-up."""
        return self.outcomes.total()

    @property
    def distributions(self) -> dict[str, Distribution]:
        """By the metric's name, in seconds, of the requests that completed."""
        one = self.latencies
        return {"ttft": one["ttft"], "tpot": one["tpot"], "itl": self.gaps, **one}

    @property
    def samples(self) -> list[Sample]:
        """Those kept, evenly thinned, and the last."""
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
            "queue": queue_seconds(record.phases),
            "prefill": prefill_seconds(record.phases),
        }
        if record.first_token is not None and record.last_token is not None:
            seconds["decode"] = record.last_token - record.first_token
        for name, value in seconds.items():
            if value is not None:
                self.latencies[name].add(value)
        self.gaps.extend(record.gaps)

    def _note_error(self, outcome: Outcome, error: str) -> None:
        key = (outcome.value, error[:_ERROR_LENGTH])
        if key not in self.errors and len(self.errors) >= _SHOWN_ERRORS:
            key = (outcome.value, "other errors")
        self.errors[key] += 1


def shown_phases(record: RequestRecord) -> list[tuple[str, float, float]]:
    """The phases that the target told, or else what the client saw: a wait for the first token, then decode."""
    if record.phases or record.first_token is None or record.last_token is None:
        return [*record.phases]
    first = record.first_token
    return [("first token", record.sent, first), ("decode", first, record.last_token)]
