"""`quire calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.frontend.cli.flags import AttachFlags, CommonFlags, EngineFlags, option, takes_flags
from quire.frontend.cli.model import engine_options
from quire.frontend.cli.output import say, write
from quire.frontend.cli.report import writable
from quire.frontend.whole_file import write_whole

if TYPE_CHECKING:
    from quire.protocol.simulation import Calibration

_SECONDS = 60.0


@takes_flags
def calibrate(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write, as JSON.", metavar="FILE", show_default=False)
    ],
    seconds: Annotated[
        float | None, option(None, "How long to measure, about. Default: 60.", "S", min=5.0, max=600.0)
    ] = None,
    *,
    engine: EngineFlags,
    attach: AttachFlags,
    common: CommonFlags,
) -> None:
    """Measure what the steps of an engine take on this host, for `quire simulate`.

    It serves batches of all sizes, short and long prompts and mixtures of them, and fits what a step takes to what it
    computes; and single requests after rests of several lengths. The engine should be set up as it will be in service,
    and the host should have nothing else to do.
    """
    del common
    writable("--output", output)
    import asyncio

    import msgspec
    import uvloop

    from quire.frontend.evaluation.calibration.calibrate import calibrate as measure
    from quire.frontend.evaluation.replay.engine_target import EngineTarget
    from quire.frontend.evaluation.replay.interference import StealTime, explain_steal

    model, options = engine_options(engine, attach)
    target = EngineTarget.from_options(model, **options)
    stolen = StealTime()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            found = runner.run(measure(target, seconds or _SECONDS, say))
        finally:
            runner.run(target.close())
    write_whole(output, msgspec.json.format(msgspec.json.encode(found), indent=1).decode() + "\n")
    write(f"{output}: {describe(found)}\n")
    if words := explain_steal(stolen.share):
        say(f"{words}; calibrate again when it is quieter")


def describe(calibration: Calibration) -> str:
    """The times in a few words."""
    step, client = calibration.step, calibration.client
    return (
        f"a step takes {_us(step.base)}, {_us(step.prefill_token)} for each token of a prompt and {_us(step.decode)} "
        f"for each that decodes, more with long contexts; {calibration.error:.0%} off in the median of "
        f"{calibration.steps} steps. A client is {_us(client.to_engine)} from its engine, which is "
        f"{_us(client.to_client)} from its client and takes {_us(client.wake_seconds(0))} to wake, "
        f"{_us(client.wake_seconds(1))} after a rest"
    )


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds >= 1e-4 else f"{seconds * 1e6:.1f} us"
