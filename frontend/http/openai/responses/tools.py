"""The tools of a response, which are flat, in the form of Chat Completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.frontend.http.errors import bad_request
from quire.frontend.http.openai.fields import NOT_HERE, TOOL_REFUSED
from quire.frontend.http.openai.responses.body import WORDS
from quire.frontend.http.transport.bodies import Refusals, without_refused
from quire.frontend.http.wording import worded
from quire.frontend.text.chat.tools import ToolUse, check_tools

FUNCTION_KEYS = ("name", "description", "parameters", "strict")
_REFUSED: Refusals = {
    **TOOL_REFUSED,
    "async": ((False,), NOT_HERE),
    "output_schema": ((), "say it in the description"),
}


def tool_use(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, parallel: bool | None
) -> ToolUse | None:
    """The tools of a body and the choice among them; None if there are none. Raises `ApiError` 400."""
    nested = [_nested(tool, f"tools[{index}]") for index, tool in enumerate(tools or [])]
    with worded(WORDS):
        return check_tools(nested, _nested_choice(choice), parallel)


def _nested(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad_request(
            f"{where} is of type {tool.get('type')!r}; this server has no tools of its own, so give type 'function'",
            f"{where}.type",
        )
    tool = without_refused(tool, FUNCTION_KEYS, _REFUSED, where)
    if unknown := sorted(set(tool) - {"type", *FUNCTION_KEYS}):
        raise bad_request(
            f"{where} has {unknown[0]!r}, which is not supported; known are type, {', '.join(FUNCTION_KEYS)}", where
        )
    return {"type": "function", "function": {key: tool[key] for key in FUNCTION_KEYS if key in tool}}


def _nested_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, Mapping):
        return choice
    match choice.get("type"):
        case "function":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case "allowed_tools":
            given = choice.get("tools")
            named = [_nested_choice(tool) for tool in given] if isinstance(given, list) else given
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
        case _:
            return choice
