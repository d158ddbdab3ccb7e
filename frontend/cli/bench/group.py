"""`quire bench`: puts its subcommands together."""

from __future__ import annotations

import typer

from quire.frontend.cli.bench import latency, serve, sweep, throughput
from quire.frontend.cli.commands import add_command

bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Measure an engine or a server with made-up requests: latency, throughput, serve, sweep.",
    epilog="Flags and JSON fields are those of `vllm bench` where it has them; `quire replay` sends traces.",
)
for _command in (latency.latency, throughput.throughput, serve.serve, sweep.sweep):
    add_command(bench, _command)
