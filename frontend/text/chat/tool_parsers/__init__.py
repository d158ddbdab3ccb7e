"""The formats in which models write tool calls, by name."""

from __future__ import annotations

from quire.frontend.text.chat.tool_parsers.base import ToolParser
from quire.frontend.text.chat.tool_parsers.hermes import HermesParser
from quire.frontend.text.chat.tool_parsers.json_call import JsonCallParser
from quire.frontend.text.chat.tool_parsers.llama3_json import Llama3JsonParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "json_call": JsonCallParser,
    "llama3_json": Llama3JsonParser,
}

__all__ = ["TOOL_PARSERS", "ToolParser", "detect_parser"]


def detect_parser(template_source: str) -> str | None:
    """The name of the format that a chat template teaches its model; None if it knows no tools, or unknown ones.

    `json_call` is never detected: no model is trained on it.
    """
    if "tools" not in template_source:
        return None
    if "<tool_call>" in template_source and '"arguments"' in template_source.replace("\\", ""):
        return "hermes"
    if "<|start_header_id|>" in template_source and '"parameters"' in template_source.replace("\\", ""):
        return "llama3_json"
    return None
