"""vLLM's flags on a command line: its spellings of Quire's own, and those that Quire does not have."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from quire.frontend.adapters import as_module
from quire.frontend.vllm.options import ALIASES, ENGINE_OPTIONS, ForeignOption, nearest_text, own_options, take
from quire.frontend.vllm.script_args import text_value
from quire.protocol.options import command_line, flag_of

_MARK = "--dtype"  # in every command that takes the options of an engine
_LEVEL = re.compile(r"(-O)(\d)")  # of optimization, as -O3
_LISTS = ("--allowed-origins",)  # which vLLM has as one value, a list in JSON
_SEVERAL = {  # flags that in vLLM take all that follow
    "--served-model-name": re.compile(r"[^-\s]\S*"),  # here once there is a model
    "--lora-modules": re.compile(r"[^-\s={][^\s=]*=.+|\{.*", re.DOTALL),
}
_RENAMED = {"max_cpu_loras": "max_loras", "kv_offloading_size": "kv_host_memory"}
_READ = ("--max-loras", "--kv-host-memory", "--device")  # own flags by which `own_options` renames others
_WITHOUT_MODEL = ("--lora-modules",)  # whose values are not like a model's name

# Values that hold for commands, though not for Python.
_HERE = {"generation_config": ("auto",)}


class _Flag(NamedTuple):
    """A flag that only vLLM has: `text` is the value in the same argument, `key` names one entry of a JSON object."""

    name: str
    row: ForeignOption
    text: str | None
    key: str = ""
    is_negated: bool = False


def own_arguments(arguments: Sequence[str], own: Mapping[str, bool]) -> list[str]:
    """Return the arguments of a command with its own flags only, in its own spelling; vLLM's others are taken.

    `own`: each flag, and whether it takes a value. Raises `ValueError` for what cannot be had.
    """
    if _MARK not in own:
        return list(arguments)
    waiting, read = deque(arguments), dict[str, Any]()
    found = list(_own(waiting, own, read))
    renamed = [own_name for name, own_name in _RENAMED.items() if name in read]
    values = own_options(read, {*_RENAMED.values(), "device"}) if renamed else {}
    found += command_line({name: values[name] for name in renamed if name in values})  # the last one counts
    return [*found, *waiting]


def _own(waiting: deque[str], own: Mapping[str, bool], read: dict[str, Any]) -> Iterator[str]:
    """Yield the arguments until `--`; `read` gets the values of vLLM's that are to be renamed, and of `_READ`."""
    has_model = False
    while waiting:
        argument = waiting.popleft()
        if argument == "--":
            waiting.appendleft(argument)
            return
        flag, equals, text = argument.partition("=")
        flag = _spelled(flag)
        has_model |= flag == "--model" or not argument.startswith("-")
        if flag in own:
            with_value = list(_with_value(flag, text if equals else None, waiting if own[flag] else deque()))
            if flag in _READ:
                read[flag[2:].replace("-", "_")] = text_value(with_value[-1].removeprefix(f"{flag}="))
            yield from with_value
            if flag in _SEVERAL and not equals and (has_model or flag in _WITHOUT_MODEL):
                while waiting and _SEVERAL[flag].fullmatch(waiting[0]):
                    yield from _with_value(flag, None, waiting)
        elif (foreign := _foreign(flag, text if equals else None)) is not None:
            if flag_of(_RENAMED.get(foreign.name, "")) in own:
                read[foreign.name] = _value(foreign, waiting)
            else:
                _take(foreign, waiting)
        else:
            yield argument


def _spelled(flag: str) -> str:
    """Return a flag with dashes, or the long one that it stands for."""
    flag = flag.replace("_", "-") if flag.startswith("--") else flag
    return flag_of(ALIASES[flag]) if flag in ALIASES else flag


def _with_value(flag: str, text: str | None, waiting: deque[str]) -> Iterator[str]:
    """Yield one of the command's own flags and its value, the nearest that Quire has for one of vLLM."""
    is_apart = text is None
    if is_apart and waiting:
        text = waiting.popleft()
    if text is None:
        yield flag
        return
    values = json.loads(text) if flag in _LISTS and text.startswith("[") else [text]
    if flag == "--lora-modules":
        values = list(map(as_module, values))
    for value in values:
        near = nearest_text(flag[2:].replace("-", "_"), value)
        yield from (flag, near) if is_apart else (f"{flag}={near}",)


def _foreign(flag: str, text: str | None) -> _Flag | None:
    if level := _LEVEL.fullmatch(flag):
        flag, text = level.groups()
    stem, _, key = flag.partition(".")
    name = _spelled(stem)[2:].replace("-", "_")
    if name in ENGINE_OPTIONS and stem.startswith("-"):
        return _Flag(name, ENGINE_OPTIONS[name], text, key)
    positive = name.removeprefix("no_")
    if positive in ENGINE_OPTIONS and ENGINE_OPTIONS[positive].is_switch and stem.startswith("--no-"):
        return _Flag(positive, ENGINE_OPTIONS[positive], text, is_negated=True)
    return None


def _take(flag: _Flag, waiting: deque[str]) -> None:
    value = _value(flag, waiting)
    if value not in _HERE.get(flag.name, ()):
        take(flag.name, {flag.key: value} if flag.key else value)


def _value(flag: _Flag, waiting: deque[str]) -> Any:
    if flag.row.is_switch:
        return not flag.is_negated if flag.text is None else text_value(flag.text.lower())
    if flag.text is not None:
        return text_value(flag.text)
    if flag.row.is_list:
        values = []
        while waiting and not waiting[0].startswith("-"):
            values.append(text_value(waiting.popleft()))
        return values
    if not waiting:
        raise ValueError(f"{flag_of(flag.name)} needs a value")
    return text_value(waiting.popleft())
