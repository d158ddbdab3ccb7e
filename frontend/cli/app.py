"""The `quire` command, with its subcommands.

Subcommands import their dependencies when they run, so that `quire --help` is fast.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from quire.frontend.cli import (
    calibrate,
    chat,
    engine,
    engines,
    info,
    lora,
    models,
    pull,
    quantize,
    reload,
    replay,
    run_model,
    running,
    serve,
    simulate,
    trace,
)
from quire.frontend.cli.bench import offline, sweep
from quire.frontend.cli.bench import serve as bench_serve
from quire.frontend.cli.evaluation import check_evaluation
from quire.frontend.cli.flags import SAMPLING_NOTE
from quire.frontend.cli.help import HELP_ALL, write_help
from quire.frontend.vllm.flags import own_arguments

# Flags with the pattern of a further value, since other arguments may follow.
_SEVERAL = {"--goodput": re.compile(r"\w+:[\d.]+"), "--compare": re.compile(r"[^-].*\.json")}


class QuireCommand(TyperCommand):
    """A command that also takes vLLM's flags. Some take all values that follow, and may also be given several times."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the command's own flags, and give each value a flag of its own, as the parser requires."""
        if HELP_ALL in args:
            ctx.meta[HELP_ALL] = True
            args = ["--help"]
        options = [each for each in self.params if isinstance(each, TyperOption)]
        own = {name: not each.is_flag for each in options for name in (*each.opts, *each.secondary_opts)}
        try:
            arguments = own_arguments(args, own)
        except ValueError as error:
            raise typer.BadParameter(str(error), ctx) from None
        return super().parse_args(ctx, list(spread(arguments)))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        write_help(self, ctx, formatter, shows_all=HELP_ALL in ctx.meta)


class EvaluationCommand(QuireCommand):
    """A command that needs `quire.frontend.evaluation`."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises ValueError if evaluation is not installed."""
        check_evaluation(f"`{ctx.command_path}`")
        return super().invoke(ctx)


class QuireGroup(TyperGroup):
    """A command that has commands. Alone it shows its help, which looks like that of the commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Ask for the help if there are no arguments."""
        return super().parse_args(ctx, args or ["--help"])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        write_help(self, ctx, formatter, shows_all=True)


def spread(arguments: Iterable[str]) -> Iterator[str]:
    """Yield the arguments, with a flag before each of its values."""
    flag, is_first = None, False
    for argument in arguments:
        if argument in _SEVERAL:
            flag, is_first = argument, True
        elif is_first:
            is_first = False
        elif flag is not None and _SEVERAL[flag].fullmatch(argument):
            yield flag
        else:
            flag = None
        yield argument


def add_command(app: typer.Typer, command: Callable[..., object], name: str | None = None) -> None:
    """Add a function as a command, by default of the same name; its docstring is the help."""
    kind = EvaluationCommand if command in _EVALUATION else QuireCommand
    app.command(name, help=_paragraphs(command.__doc__ or ""), epilog=_epilog(command), cls=kind)(command)


def _paragraphs(docstring: str) -> str:
    """Join the lines of each paragraph, so that help wraps at the terminal's width."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in docstring.split("\n\n"))


def _epilog(command: Callable[..., object]) -> str | None:
    return SAMPLING_NOTE if "temperature" in inspect.signature(command).parameters else None


app = typer.Typer(
    name="quire",
    cls=QuireGroup,
    add_completion=False,
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


_BENCHMARKS = (offline.latency, offline.throughput, bench_serve.serve, sweep.sweep)
_EVALUATION = (replay.replay, simulate.simulate, calibrate.calibrate, *_BENCHMARKS)
_COMMANDS = (
    serve.serve,
    run_model.run,
    chat.chat,
    chat.complete,
    engine.engine,
    reload.reload,
    trace.trace,
    replay.replay,
    simulate.simulate,
    calibrate.calibrate,
    quantize.quantize,
    pull.pull,
    models.models,
    running.ps,
    info.info,
    engine.keys,
    info.version,
)
for _command in _COMMANDS:
    add_command(app, _command)
add_command(app, models.models, "list")

bench = typer.Typer(
    name="bench",
    cls=QuireGroup,
    help="Benchmark an engine or a server with synthetic requests: latency, throughput, serve, sweep.",
    epilog="Flags and JSON fields have the names of `vllm bench`; `quire replay` sends traces.",
)
for _command in _BENCHMARKS:
    add_command(bench, _command)
app.add_typer(bench)

engines_app = typer.Typer(
    name="engines",
    cls=QuireGroup,
    help="The engines that share the requests of a running server: list, add, drain, remove.",
    epilog="`quire serve --data-parallel-size N` starts several; `--engine ADDRESS` joins running ones.",
)
add_command(engines_app, engines.list_engines, "list")
for _command in (engines.add, engines.drain, engines.remove):
    add_command(engines_app, _command)
app.add_typer(engines_app)

lora_app = typer.Typer(
    name="lora",
    cls=QuireGroup,
    help="The LoRA adapters of a running server: list, load, unload.",
    epilog="`quire serve --lora-modules NAME=PATH` starts with some; `--allow-runtime-lora` lets a server load others.",
)
add_command(lora_app, lora.list_adapters, "list")
for _command in (lora.load, lora.unload):
    add_command(lora_app, _command)
app.add_typer(lora_app)


def run() -> int:
    """Run the command given by the arguments; return the exit status, or raise its error."""
    return int(app(prog_name="quire", standalone_mode=False) or 0)
