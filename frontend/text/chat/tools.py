"""Tools and tool choices of a request in OpenAI's form, checked."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from quire.frontend.errors import kind_of

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
TOOL_KEYS = {"type", "function", "cache_control"}  # the last has no effect: prefixes are always cached
FUNCTION_KEYS = {"name", "description", "parameters", "strict"}
FORM = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
MAX_DEPTH = 64  # of a schema, which is read and written recursively
CHOICES = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'

Mode = Literal["none", "auto", "required"]


class ToolError(ValueError):
    """Invalid tools or tool choice; `param` is the place, such as `tools[1].function.name`."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(param, problem)
        self.param = param

    def __str__(self) -> str:
        return " ".join(self.args)


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call; `parameters` is a JSON schema of an object, None if it has none."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False

    def as_openai(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The choice among tools; `names` are the only ones that may be called, None for all."""

    mode: Mode = "auto"
    names: tuple[str, ...] | None = None
    named: bool = False  # one function was named, so it is called once


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, all of which the prompt contains, and the choice among them."""

    tools: tuple[Tool, ...]
    choice: ToolChoice = ToolChoice()
    parallel: bool = True  # an answer may have more than one call

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the model may call."""
        if self.choice.mode == "none":
            return ()
        names = self.choice.names
        return tuple(tool for tool in self.tools if names is None or tool.name in names)

    @property
    def forced(self) -> bool:
        """True if the answer must be a call."""
        return self.choice.mode == "required"

    def for_template(self) -> list[dict[str, Any]]:
        """Return the tools in the form that chat templates take."""
        return [tool.as_openai() for tool in self.tools]


def hosted_tools(tools: Any, own: str = "function") -> dict[int, str]:
    """Return the types of tools that their provider would run, such as web_search, by their places.

    None are returned unless there are tools of the type `own` beside them, which can be called without them.
    """
    given = tools if isinstance(tools, (list, tuple)) else ()
    kinds = {index: tool.get("type") for index, tool in enumerate(given) if isinstance(tool, Mapping)}
    hosted = {index: kind for index, kind in kinds.items() if isinstance(kind, str) and kind not in ("", own)}
    return {} if len(hosted) == len(given) else hosted


def check_tools(
    tools: Any, tool_choice: Any = None, parallel_tool_calls: bool | None = None, *, skip_hosted: bool = False
) -> ToolUse | None:
    """Check `tools`, `tool_choice` and `parallel_tool_calls` of a request; return None if there are no tools.

    `skip_hosted`: leave `hosted_tools` out, of the tools and of those that the choice allows. Raises ToolError.
    """
    if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
        raise ToolError("parallel_tool_calls", f"is {parallel_tool_calls!r}; give true or false")
    if not tools and (tools is None or isinstance(tools, (list, tuple))):
        if tool_choice in (None, "none", "auto"):
            return None
        raise ToolError(
            "tool_choice", f"is {tool_choice!r}, but there are no tools; give tools with it, or leave it out"
        )
    checked = _check_list(tools, hosted_tools(tools) if skip_hosted else {})
    choice = _check_choice(tool_choice, {tool.name for tool in checked}, skip_hosted=skip_hosted)
    return ToolUse(checked, choice, parallel=parallel_tool_calls is not False and not choice.named)


def _check_list(tools: Any, skipped: Collection[int]) -> tuple[Tool, ...]:
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise ToolError("tools", f"is {kind_of(tools)}; give a list of {FORM}")
    checked: dict[str, Tool] = {}
    for index, given in enumerate(tools):
        if index in skipped:
            continue
        tool = _check_tool(given, f"tools[{index}]")
        if tool.name in checked:
            raise ToolError(f"tools[{index}].function.name", f"is {tool.name!r} a second time; give each its own name")
        checked[tool.name] = tool
    return tuple(checked.values())


def _check_tool(given: Any, where: str) -> Tool:
    if not isinstance(given, Mapping):
        raise ToolError(where, f"is {kind_of(given)}; give {FORM}")
    if given.get("type") != "function":
        raise ToolError(f"{where}.type", f"is {given.get('type')!r}; only 'function' is known")
    _reject_unknown(given, TOOL_KEYS, where)
    function = given.get("function")
    if not isinstance(function, Mapping):
        what = "is missing" if function is None else f"is {kind_of(function)}"
        raise ToolError(f"{where}.function", f'{what}; give {{"name": ..., "parameters": {{...}}}}')
    return _check_function(function, f"{where}.function")


def _check_function(function: Mapping[str, Any], where: str) -> Tool:
    _reject_unknown(function, FUNCTION_KEYS, where)
    name, description, strict = function.get("name"), function.get("description"), function.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        given = "is missing" if name is None else f"is {_short(name)}"
        raise ToolError(f"{where}.name", f"{given}; give 1 to 64 letters (a-z, A-Z), digits, underscores and dashes")
    if description is not None and not isinstance(description, str):
        raise ToolError(f"{where}.description", f"is {kind_of(description)}; give a string")
    if strict is not None and not isinstance(strict, bool):
        raise ToolError(f"{where}.strict", f"is {_short(strict)}; give true or false")
    return Tool(name, description, _check_parameters(function.get("parameters"), f"{where}.parameters"), bool(strict))


def _check_parameters(parameters: Any, where: str) -> dict[str, Any] | None:
    if parameters is None or parameters == {}:
        return None
    if not isinstance(parameters, Mapping):
        raise ToolError(where, f"is {kind_of(parameters)}; give a JSON schema of an object")
    if "type" not in parameters and "properties" in parameters:
        parameters = {"type": "object", **parameters}
    if parameters.get("type") != "object":
        given = "no type" if "type" not in parameters else f"type={_short(parameters['type'])}"
        raise ToolError(where, f'has {given}; arguments are an object, so give a schema with "type": "object"')
    properties = parameters.get("properties", {})
    if not isinstance(properties, Mapping):
        raise ToolError(f"{where}.properties", f"is {kind_of(properties)}; give a schema for each name")
    if _deeper(parameters, MAX_DEPTH):
        raise ToolError(where, f"is nested more than {MAX_DEPTH} levels deep; use $defs and $ref to make it flatter")
    return dict(parameters)


def _deeper(value: Any, levels: int) -> bool:
    """Return True if containers in `value` are nested more than `levels` deep."""
    if not isinstance(value, (Mapping, list, tuple)):
        return False
    inner = value.values() if isinstance(value, Mapping) else value
    return levels == 0 or any(_deeper(each, levels - 1) for each in inner)


def _check_choice(given: Any, names: set[str], *, skip_hosted: bool) -> ToolChoice:
    if given is None:
        return ToolChoice()
    if given in ("none", "auto", "required"):
        return ToolChoice(given)
    if isinstance(given, Mapping) and given.get("type") == "function":
        return ToolChoice("required", (_check_named(given, names, "tool_choice"),), named=True)
    if isinstance(given, Mapping) and given.get("type") == "allowed_tools":
        return _check_allowed(given.get("allowed_tools"), names, skip_hosted=skip_hosted)
    raise ToolError("tool_choice", f"is {_short(given)}; give {CHOICES}")


def _check_allowed(given: Any, names: set[str], *, skip_hosted: bool) -> ToolChoice:
    where = "tool_choice.allowed_tools"
    if not isinstance(given, Mapping) or not isinstance(given.get("tools"), Sequence) or not given["tools"]:
        raise ToolError(where, f'is {_short(given)}; give {{"mode": ..., "tools": [...]}} with at least one tool')
    mode = given.get("mode")
    if mode not in ("auto", "required"):
        raise ToolError(f"{where}.mode", f"is {_short(mode)}; give 'auto' or 'required'")
    skipped = hosted_tools(given["tools"]) if skip_hosted else {}
    allowed = [
        _check_named(tool, names, f"{where}.tools[{index}]")
        for index, tool in enumerate(given["tools"])
        if index not in skipped
    ]
    return ToolChoice(mode, tuple(dict.fromkeys(allowed)))


def _check_named(given: Any, names: set[str], where: str) -> str:
    function = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ToolError(where, f'is {_short(given)}; give {{"type": "function", "function": {{"name": ...}}}}')
    if name not in names:
        known = ", ".join(sorted(names))
        raise ToolError(f"{where}.function.name", f"is {_short(name)}, which is not one of the tools: {known}")
    return name


def _reject_unknown(given: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(str(key) for key, value in given.items() if key not in known and value is not None)
    if unknown:
        raise ToolError(where, f"has the unknown key {_short(unknown[0])}; known are {', '.join(sorted(known))}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
