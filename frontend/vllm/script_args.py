"""The command line of a user's script: the options of an engine as arguments of `argparse`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.frontend.vllm.options import ALIASES, ENGINE_OPTIONS, nearest_text
from quire.protocol.options import Option, flag_of


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An `ArgumentParser` to which `--max_model_len` is `--max-model-len`; the name is vLLM's."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments, those of the program if there are none given."""
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args(list(map(_with_dashes, given)), namespace)


def add_engine_arguments(parser: argparse.ArgumentParser, rows: Mapping[str, Option]) -> None:
    """Add a flag for each option of a table, and for each of vLLM's others, which help does not show."""
    for name, row in rows.items():
        how = _how(_own_value(row), is_switch=row.type is bool, is_list=row.is_list)
        _add(parser, name, help=row.description.replace("%", "%%"), **how)
    for name, foreign in ENGINE_OPTIONS.items():
        how = _how(text_value, is_switch=foreign.is_switch, is_list=foreign.is_list)
        _add(parser, name, help=argparse.SUPPRESS, **how)


def _how(kind: Callable[[str], Any], *, is_switch: bool, is_list: bool = False) -> dict[str, Any]:
    if is_switch:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": kind, "metavar": "VALUE", "nargs": "*" if is_list else None}


def _add(parser: argparse.ArgumentParser, name: str, **how: Any) -> None:
    aliases = [flag for flag, target in ALIASES.items() if target == name]
    parser.add_argument(flag_of(name), *aliases, dest=name, default=None, **how)


def _own_value(row: Option) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return row.parse(nearest_text(row.name, text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def text_value(text: str) -> Any:
    """Return the value of a flag of vLLM: JSON, or else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _with_dashes(argument: str) -> str:
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else argument
