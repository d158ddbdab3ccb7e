"""`quire trace`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from quire.frontend.cli.flags import AttachFlags, EngineFlags, SamplingFlags, option, switch, takes_flags
from quire.frontend.cli.model import Model, open_model, starts_engines
from quire.frontend.cli.output import say

if TYPE_CHECKING:
    from quire.frontend.metrics.chrome_trace import ChromeTrace
    from quire.protocol.messages import SamplingParams


@takes_flags
def trace(
    out: Annotated[Path, typer.Option("--out", help="File to write, as JSON.", metavar="FILE", show_default=False)],
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Texts to continue, all at once.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, switch(None, "--overwrite", "Replace FILE if it exists.")] = False,
    seconds: Annotated[
        float | None, option(None, "End after this time, whatever is running. Default: no limit.", "S", min=0.0)
    ] = None,
    *,
    engine: EngineFlags,
    attach: AttachFlags,
    sampling: SamplingFlags,
) -> None:
    """Record the steps of an engine, for ui.perfetto.dev or chrome://tracing.

    With PROMPTS: continue them, and end. With --engine-address alone: record a running engine, for all its clients,
    until Ctrl-C or for --seconds. The trace has a track of the steps, one for each request (queued, prefill, decode,
    preempted), and counters of KV pages, tokens and requests. Ctrl-C keeps what has been recorded.
    """
    if not prompts and starts_engines(engine, attach):
        raise typer.BadParameter("there is nothing to record; give prompts, or --engine-address of a running engine")
    if out.is_file() and not overwrite:
        raise typer.BadParameter(f"--out {out} exists; name another file, or give --overwrite")
    from quire.frontend.metrics.chrome_trace import ChromeTrace

    with _create(out) as file:
        chrome = ChromeTrace(file)
        try:
            with chrome, open_model(engine, attach) as model:
                model.runner.run(_record(model, chrome, prompts or [], model.params(sampling), seconds))
        finally:
            if chrome.is_complete:
                say(_summary(out, chrome))


@contextmanager
def _create(out: Path) -> Iterator[BinaryIO]:
    """Open the file for writing; OSError names it if it cannot be opened or written."""
    try:
        with out.open("wb") as file:
            yield file
    except OSError as error:
        if error.strerror is None or str(error.filename or out) != str(out):  # another file
            raise
        raise OSError(f"--out {out}: the file cannot be written ({error.strerror}); name another") from error


async def _record(
    model: Model, chrome: ChromeTrace, prompts: list[str], params: SamplingParams, seconds: float | None
) -> None:
    from quire.frontend.metrics.step_recording import record, watch

    async def work() -> None:
        if prompts:
            await _complete(model, prompts, params)
        else:
            say(f"recording {model.llm.engine_address}; Ctrl-C ends it")
            await watch(model.llm)

    await record(model.llm, chrome, work, seconds)


async def _complete(model: Model, prompts: list[str], params: SamplingParams) -> None:
    """Continue all prompts; the first failure cancels the others."""
    import asyncio

    tasks = [asyncio.create_task(_exhaust(model, prompt, params)) for prompt in prompts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _exhaust(model: Model, prompt: str, params: SamplingParams) -> None:
    async for _ in model.llm.generate(prompt, params, output_kind="delta"):
        pass


def _summary(out: Path, chrome: ChromeTrace) -> str:
    if not chrome.num_steps:
        return f"{out}: no steps, since the engine had no requests; send some while it is recorded"
    lost = f", {chrome.num_dropped} lost" if chrome.num_dropped else ""
    return f"{out}: {chrome.num_steps} steps{lost}, {chrome.num_requests} requests; open it in ui.perfetto.dev"
