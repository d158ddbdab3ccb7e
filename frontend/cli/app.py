"""The `quire` command, with its subcommands.

Subcommands import their dependencies when they run, so that `quire --help` is fast.
"""

from __future__ import annotations

from typing import Annotated

import typer

from quire.frontend.cli import calibrate, chat, engine, info, replay, serve, simulate, trace
from quire.frontend.cli.bench import latency, sweep, throughput
from quire.frontend.cli.bench import serve as bench_serve
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
        typer.Option(
            "--version", help="Print the version and exit.", metavar="", callback=info.show_version, is_eager=True
        ),
    ] = False,
) -> None:
    del show_version  # handled by its callback


_COMMANDS = (
    serve.serve,
    chat.chat,
    chat.complete,
    engine.engine,
    trace.trace,
    replay.replay,
    simulate.simulate,
    calibrate.calibrate,
    info.info,
    engine.keys,
    info.version,
)
for _command in _COMMANDS:
    add_command(app, _command)

bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Benchmark an engine or a server with synthetic requests: latency, throughput, serve, sweep.",
    epilog="Flags and JSON fields have the names of `vllm bench`; `quire replay` sends traces.",
)
for _command in (latency.latency, throughput.throughput, bench_serve.serve, sweep.sweep):
    add_command(bench, _command)
app.add_typer(bench)


def run() -> int:
    """Run the command given by the arguments; return the exit status, or raise its error."""
    return int(app(prog_name="quire", standalone_mode=False) or 0)
