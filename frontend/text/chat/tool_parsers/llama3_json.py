"""Tool calls as Llama 3.1 and 3.2 write them."""

from __future__ import annotations

from quire.frontend.text.chat.tool_parsers.base import ToolParser


class Llama3JsonParser(ToolParser):
    """Objects `{"name": ..., "parameters": {...}}` separated by `;`, at the start of the answer or after a python tag.

    The tag is a special token: it is seen only if the text is decoded with special tokens, but nothing needs it.
    """

    tag = "<|python_tag|>"
    opening = ""
    separator = ";"
    bare = True
