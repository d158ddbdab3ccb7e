"""Options: one row states the type, range, default, section and help of an option for every place that takes it.

A table of options is a dataclass or a msgspec Struct whose fields carry an `Option`::

    max_num_seqs: Annotated[int, Option("N", Range(1, 65536))] = 256
    seed: Annotated[int | None, Option("N", Range(0, MAX_INT64))] = None

and whose docstring explains each, under the name of its section::

    Scheduling:
        max_num_seqs: Sequences that run at once.
        seed: Seed of the seeds that requests without one are given. Default: a fresh one.

The class itself is the Python interface. `options_of` reads its rows, from which flags (`--max-num-seqs`), validation
(`check_options`), command lines (`command_line`) and the printed reference (`reference`) are made.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from os import PathLike
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

F32_MAX = 3.4e38
"""Largest value of a number that the engine computes with in f32."""

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1

_SIZE = re.compile(r"(\d{1,18}(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)
_ROW = re.compile(r" {4}(?P<name>\w+): (?P<help>.+?)(?: Default: (?P<unset>.+)\.)?")
_TEXTS = {  # by metavar
    "FOLDER": "the path of a folder",
    "FILE": "the path of a file",
    "MODEL": "the path of a folder or a GGUF file, or a name",
}
_PATTERNS = {  # by metavar, each with its words
    "DEVICE": (re.compile(r"auto|cpu|cuda(:\d{1,3})?"), "auto, cpu, cuda, or as cuda:1 for one of several GPUs"),
}
_JSON = "JSON"  # metavar of an option whose text is a JSON object


class Range(NamedTuple):
    """Numbers from `low` to `high`. `low` belongs to it if `closed`; NaN and infinity belong to no range."""

    low: float
    high: float = math.inf
    closed: bool = True

    def holds(self, value: float) -> bool:
        """Return True if `value` is in the range."""
        is_above = self.low <= value if self.closed else self.low < value
        return is_above and value <= self.high and value != math.inf

    def check(self, name: str, value: float | None) -> None:
        """Raise `ValueError` that names the field for a value out of range; None passes."""
        if value is not None and not self.holds(value):
            raise ValueError(f"{name}={value!r} is out of range; it must be {self}")

    def __str__(self) -> str:
        if self.high >= F32_MAX:
            return f"{'at least' if self.closed else 'above'} {_digits(self.low)} and finite"
        low, high = _digits(self.low), _digits(self.high)
        return f"from {low} to {high}" if self.closed else f"above {low} and at most {high}"


class Length(NamedTuple):
    """Most characters of a text; or most entries of a list or a dict, and in all of a list's entries together.

    Entries that are texts count in characters, those that are lists in token ids.
    """

    most: int
    total: int | None = None

    def check(self, name: str, value: object) -> None:
        """Raise `ValueError` that names the field for a value that is too long; one without a length passes."""
        if not hasattr(value, "__len__"):
            return
        if len(value) > self.most:
            unit = "characters" if isinstance(value, str) else "entries"
            raise ValueError(f"{name} has {len(value)} {unit}; it may have {self.most}, make it shorter")
        if self.total is None or not isinstance(value, list | tuple):
            return
        if (total := sum(len(each) for each in value if hasattr(each, "__len__"))) > self.total:
            unit = "characters" if isinstance(value[0], str) else "token ids"
            raise ValueError(f"{name} has {total} {unit} in all; it may have {self.total}, make it shorter")

    def __str__(self) -> str:
        return f"{self.most}" if self.total is None else f"{self.most}, {self.total} in all"


def lengths_of(table: type[Any]) -> dict[str, Length]:
    """Return the most that each list and dict of a table may hold, by name."""
    hints = get_type_hints(table, include_extras=True).items()
    bounds = ((name, bound) for name, hint in hints for bound in getattr(hint, "__metadata__", ()))
    return {name: bound for name, bound in bounds if isinstance(bound, Length)}


def _digits(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


@dataclass(frozen=True, slots=True)
class Option:
    """One row of a table. A field gives the first three; `options_of` adds what its annotation and docstring say.

    `choices` are all values that are allowed; `unset` describes a default that is not a value, such as "the model's".
    """

    metavar: str | None = None
    range: Range | None = None
    choices: tuple[object, ...] = ()

    name: str = ""
    section: str = ""
    help: str = ""
    unset: str | None = None
    type: Any = str  # type of a value, or of an entry of a list
    is_size: bool = False  # a value is a number of bytes, or a text such as "4GiB"
    is_list: bool = False
    is_optional: bool = False  # None is allowed as a value
    default: Any = None

    @property
    def flag(self) -> str:
        """Name of the option on a command line."""
        return flag_of(self.name)

    @property
    def is_required(self) -> bool:
        """True if there is no default."""
        return self.default is inspect.Parameter.empty

    @property
    def default_text(self) -> str:
        """The default, in words."""
        if self.unset is not None:
            return self.unset
        if isinstance(self.default, bool):
            return "yes" if self.default else "no"
        if self.default in (None, (), ""):
            return "none"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def description(self) -> str:
        """Help with the default, and with the choices if it does not explain each."""
        is_explained = all(str(choice) in self.help for choice in self.choices)
        choices = "" if is_explained else f" One of {', '.join(map(str, self.choices))}."
        return f"{self.help}{choices} Default: {self.default_text}."

    @property
    def allowed(self) -> str:
        """The values that are allowed, in words."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        if self.is_size:
            above = " above 0" * (self.range is None)
            return f"a number of bytes{above}, or text such as '4GiB' or '512MiB'"
        number = {bool: "True or False", int: "a whole number", float: "a number"}.get(self.type)
        if self.metavar == _JSON:
            return "a JSON object"
        if self.metavar in _PATTERNS:
            return _PATTERNS[self.metavar][1]
        if number is None:
            return _TEXTS.get(self.metavar or "", "a text that is not empty")
        return f"{number} {self.range}" if self.range is not None else number

    def check(self, value: object) -> None:
        """Raise `ValueError` that names the option, what was given and what is allowed."""
        if value is None:
            allows = self.is_optional
        elif self.is_list:
            allows = isinstance(value, list | tuple) and all(map(self._allows, value))
        else:
            allows = self._allows(value)
        if not allows:
            problem = "not possible" if self.range is None or self.is_size else "out of range"
            raise ValueError(f"{self.name}={value!r} is {problem}; it must be {self.allowed}")
        if self.metavar == _JSON and isinstance(value, str):
            json_object(self.name, value)

    def parse(self, text: str) -> Any:
        """Return the value that the text of a flag stands for, an entry if the option is a list.

        Raises `ValueError` as `check` does.
        """
        value: Any = text
        with contextlib.suppress(ValueError):  # the text itself is not allowed
            value = parse_size(text) if self.is_size else self.type(text)
        self.check((value,) if self.is_list else value)
        return value

    def _allows_text(self, value: object) -> bool:
        if self.metavar in _PATTERNS:
            return isinstance(value, str) and _PATTERNS[self.metavar][0].fullmatch(value) is not None
        kinds = (str, PathLike) if self.metavar in _TEXTS else (str,)
        return isinstance(value, kinds) and (self.default in ("", ()) or bool(str(value)))

    def _allows(self, value: object) -> bool:
        if self.choices:
            return any(type(value) is type(choice) and value == choice for choice in self.choices)
        if self.is_size:
            with contextlib.suppress(ValueError):
                size = parse_size(str(value))
                return type(value) in (int, str) and (size > 0 if self.range is None else self.range.holds(size))
            return False
        if self.type is bool:
            return type(value) is bool
        if self.type is str:
            return self._allows_text(value)
        kind: type[Any] = Real if self.type is float else Integral  # numpy's numbers too
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        return is_number and (self.range is None or self.range.holds(value))  # type: ignore[arg-type]


def options_of(table: type[Any]) -> Mapping[str, Option]:
    """Return the rows of a table by name."""
    key: Any = table  # mypy takes no class of dataclasses for hashable
    return _rows(key)


@functools.cache
def _rows(table: type[Any]) -> Mapping[str, Option]:
    parameters, documented = inspect.signature(table).parameters, _documented(table)
    return {
        name: _filled(replace(option, **documented.get(name, {})), name, get_args(hint)[0], parameters[name].default)
        for name, hint in get_type_hints(table, include_extras=True).items()
        if get_origin(hint) is Annotated
        for option in get_args(hint)[1:]
        if isinstance(option, Option)
    }


def _documented(table: type[Any]) -> dict[str, dict[str, Any]]:
    """Return the section, help and default in words of each option that the docstrings of a table explain."""
    found: dict[str, dict[str, Any]] = {}
    for cls in reversed(table.__mro__):
        section = ""
        for line in re.sub(r"\n {8,}", " ", inspect.cleandoc(cls.__doc__ or "")).splitlines():
            if row := _ROW.fullmatch(line):
                found[row["name"]] = {"section": section, **row.groupdict()}
            elif not line.startswith(" "):
                section = line.removesuffix(":")
    return found


def _filled(option: Option, name: str, hint: Any, default: Any) -> Option:
    members = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    types = tuple(each for each in members if each is not NoneType)
    is_list = get_origin(types[0]) in (list, tuple)
    return replace(
        option,
        name=name,
        type=get_args(types[0])[0] if is_list else types[0],
        is_size=types == (int, str),
        is_list=is_list,
        is_optional=NoneType in members,
        default=default,
    )


def check_options(values: object) -> None:
    """Raise `ValueError` for the first value of a table that is not allowed."""
    for name, option in options_of(type(values)).items():
        option.check(getattr(values, name))


def json_object(name: str, text: str) -> dict[str, Any]:
    """Return the JSON object in the text of an option. Raises `ValueError` that names the option."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{name}={text[:100]!r} is not a JSON object: {error}") from None


def flag_of(name: str, value: object = None) -> str:
    """Return the flag that gives an option a value; a switch that is off has `--no-` before its name."""
    return f"--{'no-' * (value is False)}{name.replace('_', '-')}"


def command_line(values: Mapping[str, object]) -> list[str]:
    """Return the flags that stand for values by name; a value that is None has none, and a list one for each entry."""
    given = [
        (flag_of(name, each), each)
        for name, value in values.items()
        for each in (value if isinstance(value, list | tuple) else (value,))
        if each is not None
    ]
    return [flag if isinstance(value, bool) else f"{flag}={value}" for flag, value in given]  # a value may begin with -


def parse_size(text: str) -> int:
    """Return the bytes of a size such as `4GiB`, `512MB`, `1.5G` or `1048576`; K, M, G, T alone are binary units.

    Raises `ValueError` for a text that is no size, and for a size beyond 63 bits.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it as 4GiB, 512MiB or a number of bytes")
    number, unit, binary = match.groups()
    decimal = unit and not binary and text.strip().upper().endswith("B")
    size = float(number) * (1000 if decimal else 1024) ** ("KMGT".index(unit.upper()) + 1 if unit else 0)
    if not size <= MAX_INT64:
        raise ValueError(f"{text!r} is out of range; write it as 4GiB, 512MiB or a number of bytes")
    return int(size)


def reference(tables: Iterable[type[Any]]) -> str:
    """Return the options of several tables as Markdown, in a table for each section; a name is listed once."""
    sections: dict[str, dict[str, Option]] = {}
    for table in tables:
        for name, option in options_of(table).items():
            sections.setdefault(option.section, {}).setdefault(name, option)
    head = "| option | values | default | meaning |\n|---|---|---|---|\n"
    return "\n".join(f"## {section}\n\n{head}{''.join(map(_row, rows.values()))}" for section, rows in sections.items())


def _row(option: Option) -> str:
    values = option.allowed.removeprefix("one of ").removeprefix("a ").removesuffix(" that is not empty")
    values += ", several" * option.is_list
    return f"| `{option.name}` | {values} | {option.default_text} | {option.help} |\n"
