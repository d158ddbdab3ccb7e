"""The command line of the engine process, `python -m quire.engine_core`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from quire.kernels.options import LoadOptions
from quire.protocol.engine_options import EngineProcessOptions
from quire.protocol.options import Option, options_of
from quire.protocol.speculative_config import parse_speculative_config

_DRAFTED_KV = 0.5  # part of what is left of a GPU's memory that the target's KV pages take beside a draft model or head


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one line that starts like all errors of an engine, which its owner looks for."""

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        self.exit(2, f"error: {message}\n")


def parse_arguments(arguments: Sequence[str] | None = None) -> EngineProcessOptions:
    """Return the options; print what is wrong with them and raise SystemExit(2) if they cannot be."""
    parser = Parser(
        prog="python -m quire.engine_core",
        description="Runs one engine. Prints `READY <address>` once clients can connect. "
        "SIGTERM lets its requests end first, SIGINT aborts them.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    sections: dict[str, argparse._ArgumentGroup] = {}
    for option in options_of(EngineProcessOptions).values():
        if option.section not in sections:
            sections[option.section] = parser.add_argument_group(option.section)
        _add(sections[option.section], option)
    given: dict[str, Any] = vars(parser.parse_args(arguments))
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    try:
        return EngineProcessOptions(**given | lists)
    except ValueError as error:
        parser.error(str(error))


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    words = option.description.replace("%", "%%")
    if option.type is bool:
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, help=words)
    else:
        group.add_argument(
            option.flag, type=_reader(option), required=option.is_required, metavar=option.metavar, help=words,
            action="append" if option.is_list else "store",
        )  # fmt: skip


def _reader(option: Option) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return option.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def load_options(options: EngineProcessOptions) -> LoadOptions:
    """Return the options that concern the model, which have the same names."""
    names = {field.name for field in fields(LoadOptions)} & options_of(EngineProcessOptions).keys()
    chosen = {name: getattr(options, name) for name in names}
    host_memory = options.kv_host_memory if options.enable_prefix_caching else 0  # which has pages of the prefix cache
    loads = options.speculative_config and parse_speculative_config(options.speculative_config).loads_weights
    return LoadOptions(
        **chosen
        | {"max_loras": options.max_loras if options.serves_adapters else 0, "kv_share": _DRAFTED_KV if loads else 1.0}
        | {"kv_host_memory": host_memory}
    )
