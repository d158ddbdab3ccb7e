"""Calls in the text of an answer, for chat templates that have tools but write no calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

CallWriter = Callable[[list[dict[str, Any]]], str]
"""Returns the text of calls, each of which has the keys `name` and `arguments`."""


def writer_for(template_source: str) -> CallWriter:
    """Return the writer of the format that a chat template demands of the model."""
    return next((writer for mark, writer in _WRITERS.items() if mark in template_source), listed)


def listed(functions: list[dict[str, Any]]) -> str:
    """Return calls in the `json_call` format."""
    return json.dumps(functions, ensure_ascii=False)


def hermes(functions: list[dict[str, Any]]) -> str:
    """Return calls in the generic format, which is that of Hermes too."""
    made = (json.dumps(function, ensure_ascii=False) for function in functions)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in made)


def _functools(functions: list[dict[str, Any]]) -> str:
    return "functools" + listed(functions)


def _lfm2(functions: list[dict[str, Any]]) -> str:
    made = (f"{each['name']}({_keywords(each['arguments'])})" for each in functions)
    return f"<|tool_call_start|>[{', '.join(made)}]<|tool_call_end|>"


def _keywords(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


_WRITERS: dict[str, CallWriter] = {"List of tools: ": _lfm2, "<tool_call>": hermes, "<|tool|>": _functools}
