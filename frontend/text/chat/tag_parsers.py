"""Tool parsers of formats with a tag for each argument."""

from __future__ import annotations

from quire.frontend.text.chat.marked_calls import Reader, ToolParser
from quire.frontend.text.chat.tag_styles import FUNCTION, GLM45, INVOKE, MINIMAX_M2, QWEN3_CODER, SEED_OSS, TagStyle
from quire.frontend.text.chat.xml_call_reader import XmlCallReader


class Qwen3CoderParser(ToolParser):
    r"""Qwen3-Coder: `<tool_call>\n<function=NAME>\n`, the arguments in tags, `</function>\n</tool_call>`.

    The model sometimes omits the outer tag.
    """

    tag = "<tool_call>"
    call_tags = (FUNCTION,)
    list_opening = FUNCTION
    separator = FUNCTION
    closing = "</tool_call>"
    style: TagStyle = QWEN3_CODER

    def _new_reader(self) -> Reader:
        return XmlCallReader(self._num_calls, self._new_id, self._accepts, self._schemas, self.style)


class SeedOssParser(Qwen3CoderParser):
    """Seed-OSS: as Qwen3-Coder, between tags of its own."""

    tag = "<seed:tool_call>"
    closing = "</seed:tool_call>"
    style = SEED_OSS


class MiniMaxM2Parser(ToolParser):
    """MiniMax-M2: `<invoke name="NAME">`, the arguments in tags, `</invoke>` for each call, between tags for all."""

    tag = "<minimax:tool_call>"
    list_opening = INVOKE
    separator = INVOKE
    closing = "</minimax:tool_call>"

    def _new_reader(self) -> Reader:
        return XmlCallReader(self._num_calls, self._new_id, self._accepts, self._schemas, MINIMAX_M2)


class Glm45Parser(ToolParser):
    """GLM-4.5 to 4.7: `<tool_call>NAME`, keys and values of the arguments in tags, `</tool_call>`."""

    tag = "<tool_call>"

    def _new_reader(self) -> Reader:
        return XmlCallReader(self._num_calls, self._new_id, self._accepts, self._schemas, GLM45)
