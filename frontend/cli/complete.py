"""`quire complete`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from quire.frontend.cli.flags import AttachFlags, CommonFlags, EngineFlags, SamplingFlags, switch, takes_flags
from quire.frontend.cli.model import open_model
from quire.frontend.cli.output import PrintedAnswer, say, tolerate_encoding, write


@takes_flags
def complete(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - or nothing reads it from stdin.", show_default=False)
    ] = None,
    echo: Annotated[bool, switch(None, "--echo", "Write the prompt before its continuation.")] = False,
    *,
    engine: EngineFlags,
    attach: AttachFlags,
    sampling: SamplingFlags,
    common: CommonFlags,
) -> None:
    """Continue one text, streamed to stdout."""
    del common
    tolerate_encoding()
    text = _read() if prompt in (None, "-") else prompt or ""
    with open_model(engine, attach) as model:
        answer = PrintedAnswer()
        write(text if echo else "")
        try:
            model.runner.run(answer.stream(model.llm.generate(text, model.params(sampling), output_kind="delta")))
        finally:
            answer.end_line()
    if sys.stderr.isatty():
        say(f"[{answer.summary}]")


def _read() -> str:
    """Read the prompt from stdin, less the line break that ends the last line."""
    if sys.stdin is None or sys.stdin.isatty():
        raise typer.BadParameter("there is no prompt; give one as an argument, or pipe one in")
    return sys.stdin.read().removesuffix("\n")
