"""Synthetic records of plausible runs, for tests of reports."""

from __future__ import annotations

from array import array

import numpy as np

from quire.frontend.evaluation.replay.record import Outcome, Phase, RequestRecord, TargetSample
from quire.frontend.evaluation.report.goodput import GoodputLimits
from quire.frontend.evaluation.report.run import Run

PAGES = 2048


def synthetic_record(
    index: int, random: np.random.Generator, rate: float = 4.0, slowness: float = 1.0
) -> RequestRecord:
    """Return a request with consistent phases, gaps and times; one in twelve is preempted once."""
    sent = index / rate + float(random.uniform(0, 0.01))
    tokens = int(random.integers(1, 120))
    scheduled = sent + float(random.gamma(1.2, 0.03)) * slowness
    first = scheduled + float(random.lognormal(-2.2, 0.5)) * slowness
    gaps = array("d", (random.gamma(30, 0.001, tokens - 1) * slowness).tolist())
    phases = [Phase("queued", sent, scheduled), Phase("prefill", scheduled, first)]
    last = first
    if tokens > 40 and index % 12 == 0:
        gaps[20] += 0.8 * slowness
        held = first + sum(gaps[:20])
        last = first + sum(gaps)
        back = held + 0.6 * slowness
        phases += [
            Phase("decode", first, held),
            Phase("preempted", held, back),
            Phase("prefill", back, held + gaps[20]),
            Phase("decode", held + gaps[20], last),
        ]
    elif tokens > 1:
        last = first + sum(gaps)
        phases.append(Phase("decode", first, last))
    prompt = int(random.integers(16, 900))
    return RequestRecord(
        index=index, arrival=index / rate, sent=sent, prompt_tokens=prompt, wanted_output_tokens=tokens,
        outcome=Outcome.COMPLETED, first_token=first, last_token=last, ended=last, output_tokens=tokens,
        cached_tokens=prompt // 3, gaps=gaps, phases=phases, num_preemptions=len(phases) > 3, engine=index % 4,
    )  # fmt: skip


def synthetic_samples(records: list[RequestRecord], seconds: float) -> list[TargetSample]:
    """Return samples of a target that serves the records."""
    times = np.arange(0.0, seconds, 0.25)
    samples = []
    for time in times.tolist():
        running = sum(r.phases[0].end <= time < r.ended for r in records)
        waiting = sum(r.sent <= time < r.phases[0].end for r in records)
        begun = [r for r in records if r.phases[0].end <= time]
        answered = sum(r.output_tokens for r in begun if r.ended <= time)
        held = min(PAGES, 20 * running)
        prompt, cached = sum(r.prompt_tokens for r in begun), sum(r.cached_tokens or 0 for r in begun)
        samples.append(
            TargetSample(time, running, waiting, held, min(PAGES - held, prompt // 32), PAGES, prompt, cached, answered)
        )
    return samples


def synthetic_run(
    title: str = "synthetic", *, requests: int = 200, slowness: float = 1.0, seed: int = 0, detailed: bool = False
) -> Run:
    """Return a whole run; some of its requests fail, are refused, late or unfinished."""
    random = np.random.default_rng(seed)
    records = [synthetic_record(index, random, slowness=slowness) for index in range(requests)]
    seconds = max((record.ended for record in records), default=0.0) + 0.05
    config = {
        "backend": "quire", "model_id": "demo", "request_rate": 4.0, "burstiness": 1.0, "trace": "synthetic.jsonl",
        "seed": seed,
    }  # fmt: skip
    run = Run(title, config, goodput=GoodputLimits.parse(["ttft:300", "tpot:45"]), detailed=detailed)
    for sample in synthetic_samples(records, seconds):
        run.sample(sample)
    endings = [Outcome.ERRORED, Outcome.REFUSED, Outcome.LATE, Outcome.UNFINISHED]
    for number, outcome in enumerate(endings):
        for record in records[40 + number :: 80]:
            record.outcome, record.error = outcome, f"{outcome.value}: the answer broke off"
    for record in records:
        run.add(record)
    run.end(seconds)
    return run
