"""`quire bench throughput`."""

from __future__ import annotations

import functools
import math
from typing import Annotated

from quire.frontend.cli.bench.flags import BenchTraceFlags, LengthFlags, Workload
from quire.frontend.cli.bench.measure import measure
from quire.frontend.cli.flags import CommonFlags, option, takes_flags
from quire.frontend.cli.report import ReportFlags
from quire.frontend.cli.target import TargetFlags, open_target

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
    common: CommonFlags,
) -> None:
    """Measure requests and tokens per second when all requests arrive at once.

    At most 4096 requests are open at a time, as many as may wait in an engine; each that ends is followed by the next.
    The JSON has the fields of `vllm bench throughput` and of `vllm bench serve`. Ctrl-C ends the run with the results
    so far.
    """
    del common
    report.check()
    from quire.frontend.evaluation.bench.offline import everything_at_once, throughput_fields

    workload = Workload.of(lengths, trace)
    with open_target(target, lengths.vocab_size) as opened:
        requests = workload.requests(num_prompts, opened.context_length)
        title = opened.title(f"throughput of {num_prompts} x {workload.name}")
        config = opened.config(request_rate=math.inf, num_prompts=num_prompts, warmup=warmup, **workload.config)
        load, run = everything_at_once(warmup), report.run(title, config)
        measure(opened, run, requests, load, report, workload=workload, num=num_prompts, more=throughput_fields)
