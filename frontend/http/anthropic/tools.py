"""Anthropic's tools in the form of Chat Completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from quire.frontend.http.anthropic.body import WORDS
from quire.frontend.http.errors import bad_request
from quire.frontend.http.openai.fields import TOOL_REFUSED
from quire.frontend.http.transport.bodies import Refusals, convert
from quire.frontend.http.wording import worded
from quire.frontend.text.chat.tools import ToolUse, check_tools


class _Tool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None  # arguments are always streamed as they are written


_REFUSED: Refusals = {**TOOL_REFUSED, "input_examples": (([],), "say it in the description")}


class _Choice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


_MODES = {"auto": "auto", "any": "required", "none": "none"}


def tool_use(tools: list[dict[str, Any]] | None, choice: dict[str, Any] | None) -> ToolUse | None:
    """The tools of a body and the choice among them; None if there are none. Raises `ApiError` 400."""
    chosen = _Choice("auto") if choice is None else convert(choice, _Choice, "tool_choice")
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools or [])]
    with worded(WORDS):
        return check_tools(functions, _mode(chosen), not chosen.disable_parallel_tool_use)


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise bad_request(
            f"{where} is of type {kind!r}; this server has no tools of its own, so give name, description and "
            "input_schema",
            f"{where}.type",
        )
    given = convert(tool, _Tool, where, _REFUSED)
    function = {"name": given.name, "description": given.description, "parameters": given.input_schema}
    return {"type": "function", "function": {**function, "strict": bool(given.strict)}}


def _mode(choice: _Choice) -> str | dict[str, Any]:
    if choice.type != "tool":
        return _MODES[choice.type]
    if choice.name is None:
        raise bad_request("tool_choice.name is missing; give it with type 'tool'", "tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}
