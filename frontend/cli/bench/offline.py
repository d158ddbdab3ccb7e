"""`quire bench latency` and `quire bench throughput`."""

from __future__ import annotations

import functools
import math
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from quire.frontend.cli.bench.flags import BenchTraceFlags, LengthFlags, Workload
from quire.frontend.cli.bench.reported import reported
from quire.frontend.cli.flags import option, takes_flags
from quire.frontend.cli.output import say, write
from quire.frontend.cli.report import ReportFlags, check_writable
from quire.frontend.cli.target import TargetFlags, open_target, with_empty_cache

if TYPE_CHECKING:
    from quire.frontend.evaluation.bench.offline import Latencies


_INPUT_LEN = 32

_batch = functools.partial(option, "Batches")


@takes_flags
def latency(
    batch_size: Annotated[int, _batch("Requests per batch. Default: 8.", "N", min=1)] = 8,
    num_iters: Annotated[int, _batch("Measured batches. Default: 10.", "N", min=1)] = 10,
    num_iters_warmup: Annotated[int, _batch("Unmeasured batches before. Default: 3.", "N", min=0)] = 3,
    output: Annotated[Path | None, option("Report", "Write the report as JSON.", "FILE")] = None,
    *,
    lengths: LengthFlags,
    target: TargetFlags,
) -> None:
    """Measure the time of whole batches of requests, one after the other.

    The time runs from sending all requests of a batch at once to the end of the last answer. Prompts are new in each
    batch, so that none is in a prefix cache. The JSON has vLLM's fields; times are in seconds. Ctrl-C ends the
    measurement with the batches so far.
    """
    check_writable("--output", output)
    from quire.frontend.evaluation.bench.offline import Latencies, measure_latency

    found, sizes = Latencies(), lengths.lengths(_INPUT_LEN)
    with open_target(target, lengths.vocab_size) as opened:
        num = batch_size * (num_iters_warmup + num_iters)
        requests = [*sizes.requests(num, opened.context_length, lengths.seed)]
        config = opened.config(
            batch_size=batch_size,
            num_iters=num_iters,
            num_iters_warmup=num_iters_warmup,
            seed=lengths.seed,
            **asdict(sizes),
        )
        title = opened.title(f"latency of {batch_size} x {sizes.input_len} to {sizes.output_len} tokens")

        def work() -> Coroutine[Any, Any, str | None]:
            return measure_latency(opened.runs, requests, batch_size, num_iters_warmup, found, seed=lengths.seed)

        try:
            opened.complete(with_empty_cache(opened.runs, work))
        finally:
            if found.seconds:
                _report(title, config, found, output)


def _report(title: str, config: dict[str, Any], found: Latencies, output: Path | None) -> None:
    from quire.frontend.evaluation.report.files import save_json
    from quire.frontend.evaluation.report.numbers import time

    report = found.report()
    if output is not None:
        save_json({"title": title, **report, "interrupted": found.interrupted, "config": config}, output)
    write(f"{title}, {len(found.seconds)} batches\n")
    write(f"  average {time(1000 * report['avg_latency'])}\n")
    for percentile, seconds in report["percentiles"].items():
        write(f"  p{percentile:<6} {time(1000 * seconds)}\n")
    if output is not None:
        say(f"written: {output}")


_load = functools.partial(option, "Load")


@takes_flags
def throughput(
    num_prompts: Annotated[int, _load("Number of requests, sent all at once. Default: 1000.", "N", min=1)] = 1000,
    warmup: Annotated[int, _load("Send N unmeasured requests first. Default: 0.", "N", min=0)] = 0,
    *,
    lengths: LengthFlags,
    trace: BenchTraceFlags,
    report: ReportFlags,
    target: TargetFlags,
) -> None:
    """Measure requests and tokens per second when all requests arrive at once.

    At most 4096 requests are open at a time, as many as may wait in an engine; each that ends is followed by the next.
    The JSON has the fields of `vllm bench throughput` and of `vllm bench serve`. Ctrl-C ends the run with the results
    so far.
    """
    report.check()
    from quire.frontend.evaluation.bench.offline import everything_at_once, throughput_fields
    from quire.frontend.evaluation.replay.load import Extent

    workload = Workload.of(lengths, trace)
    with open_target(target, lengths.vocab_size) as opened:
        requests = workload.requests(num_prompts, opened.context_length)
        title = opened.title(f"throughput of {num_prompts} x {workload.name}")
        config = opened.config(request_rate=math.inf, num_prompts=num_prompts, warmup=warmup, **workload.config)
        load, run = everything_at_once(warmup), report.run(title, config)
        with reported(run, report, workload, num_prompts, throughput_fields):
            opened.measure(run, requests, load, seed=workload.seed, extent=Extent(num_prompts), empties_cache=True)
