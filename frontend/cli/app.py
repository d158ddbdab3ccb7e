"""The `quire` command: puts its subcommands together.

Subcommands import what they need when they run, so that `quire --help` is quick.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated

import typer

from quire.frontend.cli import calibrate, chat, complete, engine, info, keys, replay, serve, simulate, trace, version
from quire.frontend.cli.flags import SAMPLING_NOTE
from quire.frontend.cli.several import SeveralValues


def _paragraphs(docstring: str) -> str:
    """Join the lines of each paragraph, so that help is wrapped to the terminal's width."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in docstring.split("\n\n"))


def _epilog(command: Callable[..., object]) -> str | None:
    return SAMPLING_NOTE if "temperature" in inspect.signature(command).parameters else None


app = typer.Typer(
    name="quire",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve language models on CPUs. Every command uses the embedded demo model unless --model names another.",
    epilog="Ctrl-C ends a command cleanly (status 130). Errors end it with status 1, wrong usage with 2.",
)


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", metavar="", callback=version.show, is_eager=True),
    ] = False,
) -> None:
    del show_version  # its callback has done it


_COMMANDS = (
    serve.serve,
    chat.chat,
    complete.complete,
    engine.engine,
    trace.trace,
    replay.replay,
    simulate.simulate,
    calibrate.calibrate,
    info.info,
    keys.keys,
    version.version,
)
for _command in _COMMANDS:
    app.command(help=_paragraphs(_command.__doc__ or ""), epilog=_epilog(_command), cls=SeveralValues)(_command)


def run() -> int:
    """Run the command that the arguments name; return the status to exit with. Raises what goes wrong."""
    return int(app(prog_name="quire", standalone_mode=False) or 0)
