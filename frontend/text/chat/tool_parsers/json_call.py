"""Tool calls of any model: the format that a grammar forces on those that have none of their own."""

from __future__ import annotations

from quire.frontend.text.chat.tool_parsers.base import ToolParser


class JsonCallParser(ToolParser):
    """The whole answer is a list of calls: `[{"name": ..., "arguments": {...}}, ...]`."""

    opening = "["
    separator = ","
    closing = "]"
    bare = True
