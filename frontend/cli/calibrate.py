"""`quire calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.frontend.cli.flags import AttachFlags, EngineFlags, option, takes_flags
from quire.frontend.cli.output import say, write
from quire.frontend.cli.report import check_writable
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
        float | None, option(None, "Approximate duration of the measurement. Default: 60.", "S", min=5.0, max=600.0)
    ] = None,
    *,
    force: Annotated[bool, typer.Option("--force", help="Write a fit that cannot be trusted, too.")] = False,
    engine: EngineFlags,
    attach: AttachFlags,
) -> None:
    """Measure the time of engine steps on this host, for `quire simulate`.

    It runs batches of all sizes, with short and long prompts and mixtures, and fits the time of a step to its work;
    single requests after idle periods of several lengths; and fetches of KV pages, as by other engines. Configure the
    engine as in production, on a host that is otherwise idle. A fit that cannot be trusted is not written, and the
    status is 1.
    """
    check_writable("--output", output)
    import asyncio

    import msgspec
    import uvloop

    from quire.frontend.evaluation.calibration.calibrate import calibrate as measure
    from quire.frontend.evaluation.replay.engine_target import EngineTarget
    from quire.frontend.evaluation.replay.interference import StealTime, explain_steal

    target = EngineTarget.from_options(**engine.given, **attach.given)
    steal = StealTime()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            found = runner.run(measure(target, seconds or _SECONDS, say))
        finally:
            runner.run(target.close())
    for doubt in found.doubts:
        say(f"not to be trusted: {doubt}")
    if found.doubts and not force:
        raise RuntimeError(f"{output} was not written: the fit cannot be trusted, as said above; or give --force")
    write_whole(output, msgspec.json.format(msgspec.json.encode(found), indent=1).decode() + "\n")
    write(f"{output}: {describe(found)}\n")
    if words := explain_steal(steal.share):
        say(f"{words}; calibrate again when it is quieter")


def describe(calibration: Calibration) -> str:
    """Summarize the calibration in a few words."""
    step, client, fetch = calibration.step, calibration.client, calibration.fetch
    return (
        f"a step takes {_us(step.base)}, {_us(step.prefill_token)} for each token of a prompt and {_us(step.decode)} "
        f"for each that decodes, more with long contexts; {calibration.error:.0%} off in the median of "
        f"{calibration.steps} steps{_unseen(calibration)}. A client is {_us(client.to_engine)} from its engine, which "
        f"is {_us(client.to_client)} from its client and takes {_us(client.wake_seconds(0))} to wake, "
        f"{_us(client.wake_seconds(1))} after a rest. Another engine fetches a prefix in {_us(fetch.answer)}, and "
        f"{_us(fetch.token)} for each of its tokens"
    )


def _unseen(calibration: Calibration) -> str:
    held_out, noise = calibration.held_out_error, calibration.noise
    parts = [f"{held_out:.0%} of those it has not seen"] if held_out is not None else []
    parts += [f"repeated ones differ by {noise:.0%}"] if noise is not None else []
    return "".join(f", {part}" for part in parts)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds >= 1e-4 else f"{seconds * 1e6:.1f} us"
