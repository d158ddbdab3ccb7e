"""Writes calls and their results as words, for chat templates that know neither."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from quire.frontend.errors import ChatTemplateError


def calls_as_text(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked `messages` without tools in them.

    A call is what the assistant said, in the form `json_call`, which is forced on models that have none of their own.
    Results are what the user said: those in a row in one message, as many templates want the roles to take turns.
    Raises ChatTemplateError for arguments that are nested too deep to be written.
    """
    written: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the functions, by the id of the call
    results: dict[str, Any] | None = None  # the message of results that others may join
    for message in messages:
        calls = message.get("tool_calls", ())
        names |= {call["id"]: call["function"]["name"] for call in calls if isinstance(call.get("id"), str)}
        if message["role"] != "tool":
            results = None
            written.append(_with_calls(message, calls) if calls else dict(message))
            continue
        name = names.get(message.get("tool_call_id", ""), message.get("name", "the call"))
        text = f"Result of {name}: {message['content']}"
        if results is None:
            results = {"role": "user", "content": text}
            written.append(results)
        else:
            results["content"] += "\n" + text
    return written


def _with_calls(message: Mapping[str, Any], calls: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    functions = [{key: call["function"][key] for key in ("name", "arguments")} for call in calls]
    try:
        text = json.dumps(functions, ensure_ascii=False)
    except RecursionError:
        raise ChatTemplateError("tool_calls have arguments that are nested too deep; give flatter ones") from None
    said = f"{message['content']}\n{text}" if message["content"] else text
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": said}
