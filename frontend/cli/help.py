"""The help of a command: its commands, and its flags by group, with whole names, also in 80 columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from typer.core import TyperArgument, TyperOption

if TYPE_CHECKING:
    from typer.core import TyperCommand, TyperGroup

HELP_ALL = "--help-all"
_MOST_AT_ONCE = 30  # flags; of more, the first page has those that most users need
_COMMON = frozenset({
    "--api-key", "--base-url", "--device", "--dtype", "--engine-address", "--goodput", "--host", "--html",
    "--input-len", "--kv-disk", "--max-concurrency", "--max-model-len", "--max-num-seqs", "--max-tokens",
    "--memory-limit", "--model",
    "--num-prompts", "--output", "--output-len", "--port", "--quantization", "--rate", "--request-rate", "--seed",
    "--served-model-name", "--speculative-config", "--temperature", "--threads", "--top-p",
})  # fmt: skip
_WIDEST_NAME = 34  # columns; help of a longer name begins on the next line


def write_help(command: TyperCommand | TyperGroup, ctx: Any, formatter: Any, *, shows_all: bool) -> None:
    """Write the help of a command to a formatter of Click; without `shows_all`, of a few flags if there are many."""
    command.format_usage(ctx, formatter)
    command.format_help_text(ctx, formatter)
    arguments = [each for each in command.params if isinstance(each, TyperArgument)]
    options = [each for each in command.params if isinstance(each, TyperOption) and not each.hidden]
    _write(formatter, "Arguments", ((each.metavar or (each.name or "").upper(), each.help or "") for each in arguments))
    own = [each for each in options if each.rich_help_panel is None]
    groups: dict[str, list[TyperOption]] = {}
    for option in options:
        if option.rich_help_panel is not None:
            groups.setdefault(str(option.rich_help_panel), []).append(option)
    _write(formatter, "Options", [*map(_row, own), ("-h, --help", "Show this message and exit.")])
    commands = getattr(command, "commands", {})
    _write(formatter, "Commands", ((name, _first_paragraph(each.help or "")) for name, each in commands.items()))
    is_short = not shows_all and len(options) > _MOST_AT_ONCE
    if is_short:
        common = [each for each in options if each not in own and _COMMON & {*each.opts}]
        _write(formatter, "Most used", map(_row, common))
    else:
        for title, group in groups.items():
            _write(formatter, title, map(_row, group))
    if is_short:
        count = len(options) - len(own) - len(common)
        formatter.write_paragraph()
        formatter.write_text(f"{count} more flags ({', '.join(groups)}): {ctx.command_path} {HELP_ALL}")
    if command.epilog:
        formatter.write_paragraph()
        formatter.write_text(command.epilog)


def _write(formatter: Any, title: str, rows: Iterable[tuple[str, str]]) -> None:
    if listed := list(rows):
        with formatter.section(title):
            formatter.write_dl(listed, col_max=_WIDEST_NAME)


def _first_paragraph(text: str) -> str:
    return text.split("\n\n", 1)[0]


def _row(option: TyperOption) -> tuple[str, str]:
    """Return a flag with the name of its value, and its help."""
    names = ", ".join(sorted(option.opts, key=len))
    if option.secondary_opts:
        return f"{names}, {option.secondary_opts[0]}", option.help or ""
    return f"{names} {option.metavar or ''}".rstrip(), option.help or ""
