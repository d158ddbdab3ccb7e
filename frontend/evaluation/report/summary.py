"""Figures of a run, under the names of `vllm bench serve --save-result`.

TTFT, TPOT and the other latencies are of completed requests, and are defined by `RequestRecord`. ITL is of tokens: the
time from each token of an answer to the next, which is 0 if both came in one increment. So its mean does not depend on
how a server cuts an answer into increments, and tokens that are held back to come together lengthen its tail. vLLM's
figure of this name is of increments; here that is the gap. `tokens_together_share` is the share of these zeros.

`failed` counts all requests that did not complete, as vLLM does; the fields after it count them by outcome. Names that
end in `_ms` are milliseconds, all other times are seconds. A figure of nothing is None, never 0.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from quire.frontend.evaluation.replay.record import Outcome, TargetSample
from quire.frontend.evaluation.report.quantiles import Floats, ValueDistribution
from quire.frontend.evaluation.report.rates import in_flight, in_slots, most_in_flight
from quire.frontend.evaluation.report.run import Run

PERCENTILES = (50, 90, 95, 99, 99.9)
MOST_LAG = 0.5
"""Limit on the p99 of the lag behind the schedule, in seconds: above it, the run is not valid."""

_CURVE_POINTS = 200
_TIMELINE_POINTS = 100


def summarize(run: Run) -> dict[str, Any]:
    """Return the report, ready for JSON. Raises ValueError unless the run has ended."""
    if run.seconds is None:
        raise ValueError(f"the run {run.title!r} has not ended; call end(seconds) before it is summarized")
    report = {**_heading(run), **_counts(run), **_throughput(run, run.seconds), **_goodput(run, run.seconds)}
    for name, values in run.distributions.items():
        report |= spread(name, values)
    report |= {
        "error_counts": [{"outcome": kind, "error": text, "count": n} for (kind, text), n in run.errors.most_common()],
        "engines": [{"engine": engine, **asdict(run.engines[engine])} for engine in range(_fleet(run))],
        "config": run.config,
        "curves": _curves(run),
        "timeline": _timeline(run.samples),
        "client_timeline": _client_timeline(run, run.seconds),
        "gantt": _gantt(run),
    }
    return report | (run.details.columns() if run.details else {})


def _heading(run: Run) -> dict[str, Any]:
    config = run.config
    rate = config.get("request_rate")
    reasons = _invalid_reasons(run)
    return {
        "title": run.title,
        "date": run.date,
        "backend": config.get("backend", "quire"),
        "endpoint_type": config.get("backend", "quire"),
        "model_id": config.get("model_id"),
        "num_prompts": run.requests,
        "request_rate": "inf" if rate == math.inf else rate,
        "burstiness": config.get("burstiness"),
        "max_concurrency": config.get("max_concurrency"),
        "simulated": bool(config.get("simulated", False)),
        "valid": not reasons,
        "invalid_reason": "; ".join(reasons) or None,
        "duration": run.seconds,
    }


def _invalid_reasons(run: Run) -> list[str]:
    reasons = []
    if run.interrupted is not None:
        reasons.append(f"the run was interrupted: {run.interrupted}")
    lag = _lag(run)["replay_sched_lag_p99"]
    if lag is not None and lag > MOST_LAG:
        reasons.append(
            f"requests were sent too late: p99 of the lag behind the schedule is {lag:.2f} s, at most {MOST_LAG:g} s "
            "is allowed; lower the rate, or run the client on a machine of its own"
        )
    if not run.outcomes[Outcome.COMPLETED]:
        reasons.append("no request completed")
    return reasons


def _lag(run: Run) -> dict[str, float | None]:
    shares = (50, 90, 99)
    lags = run.lags.quantiles(np.array(shares) / 100).tolist() if run.lags.count else [None] * len(shares)
    return {f"replay_sched_lag_p{share}": lag for share, lag in zip(shares, lags, strict=True)}


def _counts(run: Run) -> dict[str, Any]:
    cached, prompts = (
        (run.cached_tokens, run.prompt_tokens) if run.cached_tokens is not None else _target_counts(run.samples)
    )
    return {
        "completed": run.outcomes[Outcome.COMPLETED],
        "failed": run.requests - run.outcomes[Outcome.COMPLETED],
        "errored": run.outcomes[Outcome.ERRORED],
        "refused": run.outcomes[Outcome.REFUSED],
        "late": run.outcomes[Outcome.LATE],
        "unfinished": run.outcomes[Outcome.UNFINISHED],
        "short_answers": run.short_answers,
        "warm_up": run.warm_up,
        "warm_up_failed": run.warm_up_failed,
        "preemptions": run.preemptions,
        "total_input_tokens": run.prompt_tokens,
        "total_output_tokens": run.output_tokens,
        "partial_output_tokens": run.partial_tokens,
        "cached_tokens": cached,
        "tokens_together_share": run.token_latencies.zeros_share,
        "prefix_hit_rate": cached / prompts if cached is not None and prompts else None,
        **_lag(run),
        "replay_steal_share": run.steal,
    }


def _target_counts(samples: list[TargetSample]) -> tuple[int | None, int]:
    """Return cached and prompt tokens by the target's own counters, for answers that do not report them."""
    counted = [
        (s.cached_tokens, s.prompt_tokens)
        for s in samples
        if s.cached_tokens is not None and s.prompt_tokens is not None
    ]
    if not counted:
        return None, 0
    (cached_before, before), (cached_after, after) = counted[0], counted[-1]
    return cached_after - cached_before, after - before


def _fleet(run: Run) -> int:
    """Return the number of engines, including those that got no request."""
    size = run.config.get("engines")
    return max(size if isinstance(size, int) else 0, *(engine + 1 for engine in run.engines), 1)


def _throughput(run: Run, seconds: float) -> dict[str, Any]:
    def rate(amount: float) -> float | None:
        return amount / seconds if seconds > 0 else None

    return {
        "request_throughput": rate(run.outcomes[Outcome.COMPLETED]),
        "output_throughput": rate(run.output_tokens),
        "total_token_throughput": rate(run.prompt_tokens + run.output_tokens),
        "max_output_tokens_per_s": run.output_rate.most_per_second,
        "max_concurrent_requests": most_in_flight(run.sent, run.ended),
    }


def _goodput(run: Run, seconds: float) -> dict[str, Any]:
    if run.goodput is None:
        return {"request_goodput": None, "goodput_limits": None, "goodput_shares": None}
    names = [*run.goodput.stated, "all"]
    return {
        "request_goodput": run.met["all"] / seconds if seconds > 0 else None,
        "goodput_limits": run.goodput.stated,
        "goodput_shares": {name: run.met[name] / run.requests if run.requests else None for name in names},
    }


def spread(name: str, values: ValueDistribution) -> dict[str, float | None]:
    """Return the statistics of a latency in milliseconds, by field; None of no values."""
    keys = [f"{kind}_{name}_ms" for kind in ("mean", "std", "median", "min", "max", *(f"p{p:g}" for p in PERCENTILES))]
    if not values.count:
        return dict.fromkeys(keys)
    quantiles = values.quantiles(np.array([0.5, 0.0, 1.0, *(p / 100 for p in PERCENTILES)]))
    return dict(zip(keys, [1000 * value for value in (values.mean, values.std, *quantiles.tolist())], strict=True))


def curve_shares() -> Floats:
    """Return the shares at which curves have points: dense at both ends, where latencies differ most."""
    logits = np.linspace(math.log(0.005 / 0.995), math.log(0.9999 / 0.0001), _CURVE_POINTS - 2)
    return np.concatenate([[0.0], 1 / (1 + np.exp(-logits)), [1.0]])


def curve(values: ValueDistribution, shares: Floats) -> dict[str, Any]:
    """Return the number of values, and the milliseconds at each of the shares."""
    return {"count": values.count, "ms": _short(1000 * values.quantiles(shares))}


def _curves(run: Run) -> dict[str, Any]:
    shares = curve_shares()
    curves = {name: curve(values, shares) for name, values in run.distributions.items() if values.count}
    return {"shares": shares.tolist(), **curves}


def _timeline(samples: list[TargetSample]) -> dict[str, list[Any]]:
    """Return a column for each field that the target reports."""
    columns = {name: [getattr(sample, name) for sample in samples] for name in TargetSample._fields}
    return {name: column for name, column in columns.items() if any(value is not None for value in column)}


def _client_timeline(run: Run, seconds: float) -> dict[str, list[float]]:
    """Return what the clients saw: requests in flight, and prompt and output tokens a second."""
    if not run.requests:
        return {}
    width, (output, prompts) = in_slots((run.output_rate, run.prompt_rate), seconds)
    together = max(1, -(-len(output) // _TIMELINE_POINTS))  # slots of a point
    begins = np.arange(0, len(output), together)
    widths = width * (np.minimum(begins + together, len(output)) - begins)
    times = width * begins + widths / 2

    def per_second(slots: Floats) -> list[float]:
        return _short(np.add.reduceat(slots, begins) / widths)

    return {
        "time": _short(times),
        "in_flight": _short(in_flight(run.sent, run.ended, times)),
        "output_tokens_per_s": per_second(output),
        "prompt_tokens_per_s": per_second(prompts),
    }


def _gantt(run: Run) -> dict[str, Any]:
    """Return a row for every `every`-th request of the workload."""
    rows = [
        {
            "index": index,
            "outcome": outcome.value,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "phases": [[kind, *_short(np.array(times))] for kind, *times in phases],
        }
        for index, (outcome, prompt_tokens, output_tokens, phases) in run.shown.items()
    ]
    return {"every": run.shown.every, "rows": rows}


def _short(values: Floats) -> list[float]:
    """Round to six digits, more than a figure shows."""
    return [float(f"{value:.6g}") for value in values.tolist()]
