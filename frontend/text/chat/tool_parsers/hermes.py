"""Tool calls as Hermes 2 and 3, Qwen2.5 and Qwen3 write them."""

from __future__ import annotations

from quire.frontend.text.chat.tool_parsers.base import ToolParser


class HermesParser(ToolParser):
    """Words and any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, with line breaks in them."""

    tag = "<tool_call>"
    closing = "</tool_call>"
