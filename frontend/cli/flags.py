"""The flags that several commands share, most of them rows of the tables of options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_type_hints

import typer

from quire.frontend.cli.failures import DEBUG
from quire.frontend.http.args import ServerArgs
from quire.frontend.text.generation_config import GENERATION_DEFAULTS
from quire.protocol.address import ipc_path
from quire.protocol.engine_options import (
    ClientOptions,
    EngineOptions,
    EngineProcessOptions,
    HubOptions,
    SupervisionOptions,
)
from quire.protocol.messages import SamplingParams
from quire.protocol.options import Option, flag_of, options_of

_ADDRESSES = ("engine_address", "engine", "prefill_address", "kv_peer")
F = TypeVar("F", bound=Callable[..., Any])


def option(panel: str | None, text: str, metavar: str | None = None, **more: Any) -> Any:
    """Return a flag whose default is None, which means "not given"; its help text names the real default."""
    return typer.Option(help=text, show_default=False, metavar=metavar, rich_help_panel=panel, **more)


def switch(panel: str | None, name: str, text: str, **more: Any) -> Any:
    """Return a flag without a value."""
    return typer.Option(name, help=text, show_default=False, metavar="", rich_help_panel=panel, **more)


@contextmanager
def wrong_usage() -> Iterator[None]:
    """Raise `BadParameter`, which ends the command with status 2, for a `ValueError` that is about its flags."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _debug(value: bool) -> None:
    if value:
        os.environ[DEBUG] = "1"


@dataclass(frozen=True)
class CommonFlags:
    """Flags of every command."""

    debug: Annotated[
        bool, switch(None, "--debug", "Show the tracebacks of errors.", callback=_debug, is_eager=True)
    ] = False


class Flags:
    """Flags of some rows of a table. `given` has those that were given, by name; as attributes the others are None."""

    rows: ClassVar[Mapping[str, Option]] = {}

    def __init__(self, **values: Any) -> None:
        if unknown := values.keys() - self.rows.keys():
            raise TypeError(f"{', '.join(unknown)}: no such flags of {type(self).__name__}")
        self.given = {name: value for name, value in values.items() if value is not None}

    def __getattr__(self, name: str) -> Any:
        if name not in self.rows:
            raise AttributeError(f"{type(self).__name__} has no flag {name}")
        return self.given.get(name)

    def with_values(self, **values: Any) -> Self:
        """Return the same flags with further ones given."""
        return type(self)(**{**self.given, **values})

    def check(self) -> None:
        """Raise `ValueError` for the first value that is not allowed."""
        for name, value in self.given.items():
            self.rows[name].check(value)
            if name in _ADDRESSES:
                for address in [value] if isinstance(value, str) else value:
                    ipc_path(address)

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """Return the flags as Typer reads them off a signature; the default is None, which means "not given"."""
        annotations = {name: Annotated[_flag_type(row) | None, _typer_option(row)] for name, row in cls.rows.items()}
        return [_parameter(name, annotation, None) for name, annotation in annotations.items()]


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flag_type(row: Option) -> Any:
    kind: Any = str if row.is_size else row.type
    return list[kind] if row.is_list else kind


def _typer_option(row: Option) -> Any:
    """Typer checks types and lower bounds, the tables the rest."""
    low = row.range.low if row.range is not None and row.range.closed else None
    more: dict[str, Any] = {"min": low} if low is not None and row.type in (int, float) else {}
    flag = f"{row.flag}/--no-{row.flag[2:]}" if row.type is bool else row.flag
    text = row.description + " May be given several times." * row.is_list
    metavar = row.metavar or ""
    return typer.Option(flag, help=text, show_default=False, metavar=metavar, rich_help_panel=row.section, **more)


def rows_of(table: type[Any], names: Iterable[str] | None = None, **changes: Any) -> dict[str, Option]:
    """Return the rows of a table, or those of some names, with some fields changed: `section` is the panel of help."""
    rows = options_of(table)
    return {name: replace(rows[name], **changes) for name in names or rows}


class EngineFlags(Flags):
    """Options of the model and the scheduler, of the engine that a command starts, and of its supervisor."""

    rows = rows_of(EngineOptions) | rows_of(HubOptions) | rows_of(SupervisionOptions)

    def check(self) -> None:
        """Raise `ValueError` for the first value that is not allowed, and for options that contradict each other."""
        from quire.frontend.adapters import check_enabled, check_modules, max_rank_of
        from quire.frontend.engine_args import DEMO_MODEL

        super().check()
        check_enabled(self.given)
        check_modules(self.given.get("lora_modules", ()), max_rank_of(self.given))
        own = options_of(EngineOptions)
        EngineOptions(**{"model": DEMO_MODEL, **{name: value for name, value in self.given.items() if name in own}})


class ReloadFlags(Flags):
    """Options that a reload changes."""

    rows = rows_of(EngineOptions, unset="as it is") | rows_of(HubOptions)


class SocketFlags(Flags):
    """Options for reaching a running engine."""

    rows = rows_of(
        ClientOptions,
        ("engine_address",),
        help="The engine at ipc://PATH or tcp://HOST:PORT.",
        unset="the only one here",
    ) | rows_of(ClientOptions, ("curve_keys", "insecure_tcp"), section="A running engine")


class AttachFlags(Flags):
    """Options for reaching a running engine, and the tokenizer to use with it."""

    rows = rows_of(
        ClientOptions,
        (
            *("engine_address", "engine", "router", "fetch_prefixes", "reconnect_timeout", "curve_keys"),
            *("insecure_tcp", "prefill_address", "prefill_min_tokens", "tokenizer"),
        ),
        section="A running engine",
    )


class EngineProcessFlags(Flags):
    """Options of an engine that runs alone."""

    rows = rows_of(
        EngineProcessOptions,
        (
            *("engine_address", "max_clients", "curve_keys", "insecure_tcp", "seed", "shutdown_timeout"),
            *("heartbeat_seconds", "log_level"),
        ),
        section="Engine process and socket",
    ) | rows_of(ClientOptions, ("start_timeout",), section="Supervision")


class TemplateFlags(Flags):
    """Options for the prompts of conversations."""

    rows = rows_of(ClientOptions, ("chat_template", "chat_template_content_format"))


class HttpFlags(Flags):
    """Options of the HTTP server and of the chats that it serves."""

    rows = rows_of(ServerArgs, section="HTTP server") | rows_of(ClientOptions, ("tool_call_parser", "reasoning_parser"))


_MODELS = "the model's *, or {:g}"
SAMPLING_NOTE = "* from its generation_config.json, or its GGUF file"


def _sampling_rows() -> dict[str, Option]:
    """Return the rows of sampling flags with the defaults of a command: the model's own, and answers of any length."""
    rows = options_of(SamplingParams)
    names = ("presence_penalty", "frequency_penalty", "stop", "seed", "ignore_eos")
    return {
        "max_tokens": replace(rows["max_tokens"], unset="until the answer ends, or the context is full"),
        **{name: replace(rows[name], unset=_MODELS.format(rows[name].default)) for name in GENERATION_DEFAULTS},
        **{name: rows[name] for name in names},
    }


class SamplingFlags(Flags):
    """Sampling parameters; some have the model's own defaults."""

    rows = _sampling_rows()


@dataclass(frozen=True)
class RecordFlags:
    """Flags for recording the requests of the HTTP server."""

    record: Annotated[
        Path | None,
        option(
            "HTTP server",
            "Record requests in a new file, for `quire replay`: times, lengths, shared prefixes, parameters; no text.",
            "FILE",
        ),
    ] = None
    record_text: Annotated[bool, switch("HTTP server", "--record-text", "Record the texts of prompts as well.")] = False


def changed(flags: Any) -> dict[str, Any]:
    """Return the flags of a group that were given, or differ from their defaults."""
    if isinstance(flags, Flags):
        return dict(flags.given)
    values = dataclasses.asdict(flags)
    return {each.name: values[each.name] for each in dataclasses.fields(flags) if values[each.name] != each.default}


def flag_names(given: Mapping[str, Any]) -> str:
    """Return the names of flags as users write them, for a message."""
    return ", ".join(flag_of(name, value) for name, value in given.items())


def takes_flags(function: F) -> Callable[..., Any]:
    """Give a command `CommonFlags`, and the groups among its parameters: `engine: EngineFlags` gets `EngineFlags(...)`.

    A group is a class of `Flags`, or a dataclass whose fields are flags. Typer reads flags off a function's signature;
    this writes them there, once for all commands.
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if _is_group(hint)}
    parameters = [
        parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in groups
    ]
    for group in (*groups.values(), CommonFlags):
        parameters += _parameters(group)

    @functools.wraps(function)
    def command(**given: Any) -> Any:
        values = {name: _value(group, given) for name, group in groups.items()}
        _value(CommonFlags, given)  # their callbacks have acted
        return function(**given, **values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del command.__wrapped__  # or its signature would be read
    return command


def _is_group(hint: Any) -> bool:
    return isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, Flags))


def _parameters(group: type[Any]) -> list[inspect.Parameter]:
    """Return the flags of a group, and of the groups in it."""
    if issubclass(group, Flags):
        return group.parameters()
    found, hints = [], get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        hint = hints[field.name]
        found += _parameters(hint) if _is_group(hint) else [_parameter(field.name, hint, field.default)]
    return found


def _value(group: type[Any], given: dict[str, Any]) -> Any:
    """Return a group with its flags, which are taken out of `given`. Raises `BadParameter` for a wrong value."""
    if issubclass(group, Flags):
        flags = group(**{name: given.pop(name) for name in group.rows})
        with wrong_usage():
            flags.check()
        return flags
    hints = get_type_hints(group, include_extras=True)
    return group(**{name: _value(hint, given) if _is_group(hint) else given.pop(name) for name, hint in hints.items()})
