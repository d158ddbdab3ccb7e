"""The `quire` command: puts its subcommands together.

Subcommands import what they need when they run, so that `quire --help` is quick.
"""

from __future__ import annotations

from typing import Annotated

import typer

from quire.frontend.cli import calibrate, chat, complete, engine, info, keys, replay, serve, simulate, trace, version
from quire.frontend.cli.bench.group import bench
from quire.frontend.cli.commands import add_command

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
    add_command(app, _command)
app.add_typer(bench)


def run() -> int:
    """Run the command that the arguments name; return the status to exit with. Raises what goes wrong."""
    return int(app(prog_name="quire", standalone_mode=False) or 0)
