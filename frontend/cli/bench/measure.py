"""What the benchmarks do alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.frontend.cli.flags import EngineFlags
from quire.frontend.cli.output import say
from quire.frontend.cli.report import Report, ReportFlags, report_on
from quire.frontend.cli.workload import tell_skipped

if TYPE_CHECKING:
    from quire.frontend.cli.bench.flags import Workload
    from quire.frontend.cli.target import OpenTarget
    from quire.frontend.replay.load import Load
    from quire.frontend.replay.runs import Runs
    from quire.frontend.report.run import Run
    from quire.frontend.workload.request import WorkloadRequest


def title_of(opened: OpenTarget, what: str) -> str:
    """What is measured, and the model."""
    return f"{what} on {Path(opened.target.info.model).name}"


def context_of(opened: OpenTarget, engine: EngineFlags) -> int | None:
    """The context length; what --max-model-len says of a server that does not tell."""
    return engine.max_model_len or opened.target.info.max_model_len


def config_of(opened: OpenTarget, **more: Any) -> dict[str, Any]:
    """All that one would want to know of how a benchmark was made; less what is None."""
    info = opened.target.info
    config = {
        "backend": info.backend,
        "model_id": info.model,
        "target": info.address,
        "max_model_len": info.max_model_len,
        "vocab_size": opened.runs.vocab_size,
        **more,
    }
    return {name: value for name, value in config.items() if value is not None}


async def afresh(runs: Runs, work: Callable[[], Awaitable[str | None]]) -> str | None:
    """Do the work with an empty prefix cache: an earlier benchmark may have had the same prompts."""
    if not await runs.target.reset_cache():
        say("the server's prefix cache cannot be emptied; give another --seed each time, or it may know the prompts")
    return await work()


def measure(
    opened: OpenTarget,
    run: Run,
    requests: Iterable[WorkloadRequest],
    load: Load,
    report: ReportFlags,
    *,
    workload: Workload,
    num: int,
    more: Callable[[Report], Report] | None = None,
) -> None:
    """Send the workload's requests at their times, and report on the run, however it ends.

    They are `num` at most. `more` makes further fields of the report. Raises as `OpenTarget.measure`.
    """
    from quire.frontend.replay.extent import Extent

    runs, extent = opened.runs, Extent(num)
    try:
        opened.complete(afresh(runs, lambda: runs.replay(run, requests, load, seed=workload.seed, extent=extent)))
    finally:
        if run.seconds is not None:
            if workload.trace is not None:
                tell_skipped(workload.trace, run.config)
            report_on(run, report, more)
