"""Tool parsers of formats with a list of JSON objects between marks."""

from __future__ import annotations

from quire.frontend.text.chat.marked_calls import ToolParser


class ListParser(ToolParser):
    """A list of calls after a mark: `[CALL, ...]`."""

    list_opening = "["
    separator = ","
    closing = "]"


class GraniteParser(ListParser):
    """Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, in later versions after `<tool_call>`."""

    tag = "<|tool_call|>"
    other_tags = ("<tool_call>",)


class Phi4MiniParser(ListParser):
    """Phi-4-mini: `functools[{"name": ..., "arguments": {...}}, ...]`, or the list between tokens for it."""

    tag = "functools"
    other_tags = ("<|tool_call|>",)
    end_tag = "<|/tool_call|>"


class Cohere2Parser(ListParser):
    """Command R7B: `[{"tool_call_id": ..., "tool_name": ..., "parameters": {...}}, ...]` between tags."""

    tag = "<|START_ACTION|>"
    end_tag = "<|END_ACTION|>"


class NemotronJsonParser(ListParser):
    """Nemotron Nano v2: `<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>`."""

    tag = "<TOOLCALL>"
    end_tag = "</TOOLCALL>"


class HunyuanA13BParser(ListParser):
    """HunYuan A13B: `<tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>`, as Apriel too.

    Where HunYuan has tools but calls none, its answer begins with `lead` ("Assistant:").
    """

    tag = "<tool_calls>"
    lead = "\N{CJK UNIFIED IDEOGRAPH-52A9}\N{CJK UNIFIED IDEOGRAPH-624B}\N{FULLWIDTH COLON}"
    end_tag = "</tool_calls>"
