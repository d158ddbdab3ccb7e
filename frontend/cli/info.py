"""`quire info` and `quire version`."""

from __future__ import annotations

import json
import platform
from typing import Annotated, Any

import typer

from quire.frontend.cli.flags import Flags, rows_of, switch, takes_flags
from quire.frontend.cli.output import write
from quire.frontend.http.args import ServerArgs
from quire.frontend.kernels import ask_kernels, readable_size
from quire.frontend.version import installed_version
from quire.protocol.engine_options import (
    ClientOptions,
    EngineOptions,
    EngineProcessOptions,
    HubOptions,
    SupervisionOptions,
)
from quire.protocol.messages import SAMPLING_LENGTHS, STRUCTURED_LENGTHS, SamplingParams
from quire.protocol.options import command_line, options_of, parse_size, reference

NAMES = {
    "cpu": "CPU", "cpus": "CPUs", "numa_nodes": "NUMA nodes", "isa": "instruction set", "memory_bytes": "memory",
    "gpus": "GPUs", "llvm_version": "LLVM",
}  # fmt: skip


class PlanFlags(Flags):
    """Options of the model whose plan is shown."""

    rows = rows_of(EngineOptions, ("model", "dtype", "quantization", "kv_cache_dtype", "memory_limit")) | rows_of(
        HubOptions
    )


@takes_flags
def info(
    as_json: Annotated[bool, switch(None, "--json", "Print JSON.")] = False,
    options: Annotated[bool, switch(None, "--options", "Print the reference of all options, as Markdown.")] = False,
    *,
    plan: PlanFlags,
) -> None:
    """Show the host (CPUs, cores, NUMA nodes, threads, instruction set, memory, GPUs) and the plan of a model on it."""
    if options:
        write(option_reference())
        return
    facts = _ask_kernels(plan)
    if as_json:
        write(json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
    else:
        _show(facts)


def option_reference() -> str:
    """Return the reference of all options, as Markdown."""
    tables = (EngineProcessOptions, HubOptions, SupervisionOptions, ClientOptions, SamplingParams, ServerArgs)
    return f"""# Options

Every option of Python (`LLM(max_num_seqs=8)`), of the command line (`--max-num-seqs 8`; a switch is turned off by
`--no-` before its name) and of the wire. Names are vLLM's where vLLM has one. `quire info --options` prints this page
from the tables in `protocol/engine_options.py`, `protocol/messages.py` and `frontend/http/args.py`.

{reference(tables)}
## Lengths

Most characters of a text, or entries of a list; `in all`: characters or token ids of all entries together. More is
rejected in Python, by HTTP and on the wire.

{_lengths()}"""


def _lengths() -> str:
    constraint = {f"structured_outputs.{name}": most for name, most in STRUCTURED_LENGTHS.items()}
    rows = (f"| `{name}` | {most} |\n" for name, most in {**SAMPLING_LENGTHS, **constraint}.items())
    return f"| field | at most |\n|---|---|\n{''.join(rows)}"


def _ask_kernels(plan: PlanFlags) -> dict[str, Any]:
    from quire.frontend.engine_args import DEMO_MODEL
    from quire.frontend.hub.resolve import resolve_model

    given = {"model": DEMO_MODEL, **plan.given}
    hub = {name: given.pop(name) for name in options_of(HubOptions) if name in given}
    model = str(resolve_model(given["model"], **hub))
    limit = None if plan.memory_limit is None else parse_size(plan.memory_limit)
    facts: dict[str, Any] = ask_kernels("info", *command_line({**given, "model": model, "memory_limit": limit}))
    return facts


def _show(facts: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    plan = facts.pop("plan", None)
    console.print(_table("Host", facts))
    if isinstance(plan, dict):
        console.print(_table("Model", {key: value for key, value in plan.items() if not _is_rows(value)}))
        for key, value in plan.items():
            if _is_rows(value):
                console.print(_rows(key, value))


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _table(title: str, facts: dict[str, Any]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    for key, value in facts.items():
        table.add_row(f"[dim]{NAMES.get(key, key.replace('_', ' '))}[/dim]", escape(_text(key, value)))
    return table


def _rows(title: str, rows: list[dict[str, Any]]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns, title=title, title_justify="left", box=None, padding=(0, 2))
    for row in rows:
        table.add_row(*(escape(_text(key, row.get(key, ""))) for key in columns))
    return table


def _text(key: str, value: Any) -> str:
    if key.endswith("bytes") and isinstance(value, int):
        return readable_size(value)
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name}={_text(name, item)}" for name, item in value.items())
    return str(value)


def version() -> None:
    """Print the version of Quire and of Python."""
    typer.echo(f"quire {installed_version()} (Python {platform.python_version()}, {platform.machine()})")


def show_version(value: bool) -> None:
    """Implement `quire --version`."""
    if value:
        version()
        raise typer.Exit
