"""Tool parsers: the formats in which models write tool calls."""

from __future__ import annotations

import secrets

from quire.frontend.text.chat.events import Event
from quire.frontend.text.chat.generic_tools import GENERIC
from quire.frontend.text.chat.keyword_call_reader import KeywordCallReader
from quire.frontend.text.chat.line_call_reader import LineCallReader
from quire.frontend.text.chat.marked_calls import ALPHANUMERIC, Reader, State, ToolParser
from quire.frontend.text.chat.named_call_reader import ID, NAME, NamedCallReader
from quire.frontend.text.chat.scanning import match_mark
from quire.frontend.text.chat.tag_styles import (
    ARG_KEY,
    FUNCTION,
    GLM45,
    INVOKE,
    MINIMAX_M2,
    PARAMETER,
    QWEN3_CODER,
    SEED_OSS,
    TagStyle,
)
from quire.frontend.text.chat.xml_call_reader import XmlCallReader


class HermesParser(ToolParser):
    """Hermes 2 and 3, Qwen2.5, Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` between text."""

    tag = "<tool_call>"
    closing = "</tool_call>"


class GenericParser(HermesParser):
    """Any model, which is told of this format by the system's message (`generic_tools`); a grammar enforces it.

    So a mark at the end of the answer is a call that was cut off, and not text.
    """

    def finish(self) -> list[Event]:
        """End the text; return the events that were held back."""
        if self._state is State.CALL and not self._reader.started:
            return self._take_events()
        return super().finish()


class JsonCallParser(ToolParser):
    """Any model: a grammar forces the whole answer to be `[{"name": ..., "arguments": {...}}, ...]`."""

    opening = "["
    separator = ","
    closing = "]"
    bare = True


class Llama3JsonParser(ToolParser):
    """Llama 3.1 and 3.2: `{"name": ..., "parameters": {...}}` separated by `;`, at the start or after a python tag.

    The tag is a special token: it is visible only if the text is decoded with special tokens, but nothing needs it.
    """

    tag = "<|python_tag|>"
    opening = ""
    separator = ";"
    bare = True


class GraniteParser(ToolParser):
    """Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, in later versions after `<tool_call>`."""

    tag = "<|tool_call|>"
    other_tags = ("<tool_call>",)
    list_opening = "["
    separator = ","
    closing = "]"


class Phi4MiniParser(ToolParser):
    """Phi-4-mini: `functools[{"name": ..., "arguments": {...}}, ...]`, or the list between tokens for it."""

    tag = "functools"
    other_tags = ("<|tool_call|>",)
    list_opening = "["
    separator = ","
    closing = "]"
    end_tag = "<|/tool_call|>"


class Cohere2Parser(ToolParser):
    """Command R7B: `[{"tool_call_id": ..., "tool_name": ..., "parameters": {...}}, ...]` between tags."""

    tag = "<|START_ACTION|>"
    list_opening = "["
    separator = ","
    closing = "]"
    end_tag = "<|END_ACTION|>"


class Glm4Parser(ToolParser):
    """GLM-4: the name of a function alone on the first line, then its arguments; one call in an answer."""

    opening = ""
    bare = True

    def _new_reader(self) -> Reader:
        return LineCallReader(self._num_calls, self._new_id, self._accepts)


BAR = "\N{FULLWIDTH VERTICAL LINE}"
BLOCK = "\N{LOWER ONE EIGHTH BLOCK}"
CALLS_BEGIN = f"<{BAR}tool{BLOCK}calls{BLOCK}begin{BAR}>"
CALLS_END = f"<{BAR}tool{BLOCK}calls{BLOCK}end{BAR}>"
CALL_BEGIN = f"<{BAR}tool{BLOCK}call{BLOCK}begin{BAR}>"
CALL_END = f"<{BAR}tool{BLOCK}call{BLOCK}end{BAR}>"
SEP = f"<{BAR}tool{BLOCK}sep{BAR}>"


class DeepSeekV31Parser(ToolParser):
    """DeepSeek V3.1: `<begin of call>NAME<sep>{...}<end of call>` for each call, between tags for all of them."""

    tag = CALLS_BEGIN
    list_opening = CALL_BEGIN
    separator = CALL_BEGIN
    closing = CALLS_END
    heads: tuple[tuple[str, ...], ...] = ((NAME, SEP),)
    tail: tuple[str, ...] = (CALL_END,)

    def _new_reader(self) -> Reader:
        return NamedCallReader(self._num_calls, self._new_id, self._accepts, self.heads, self.tail)


class DeepSeekV3Parser(DeepSeekV31Parser):
    """DeepSeek V3 and R1: the same, but for `function<sep>NAME` and the arguments in a block of Markdown."""

    heads = (("function", SEP, NAME, "```json"), ("function", SEP, NAME, "```"))
    tail = ("```", CALL_END)


class MistralParser(ToolParser):
    """Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or since its eleventh tokenizer
    `[TOOL_CALLS]NAME[ARGS]{...}` for each call, maybe with `[CALL_ID]` and an id after the name.
    """

    tag = "[TOOL_CALLS]"
    list_opening = "["
    separator = ","
    closing = "]"
    heads = ((NAME,), (NAME, "[ARGS]"), (NAME, "[CALL_ID]", ID, "[ARGS]"))
    _is_list = True

    @staticmethod
    def make_id() -> str:
        """Return a random id as the chat templates of Mistral demand it."""
        return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))

    def _open_list(self) -> bool:
        self._is_list = match_mark(self._buffer, "[") is not None
        if self._is_list:
            return super()._open_list()
        self._enter(State.CALL)
        return True

    def _step_after_call(self) -> bool:
        return super()._step_after_call() if self._is_list else self._step_marks()

    def _new_reader(self) -> Reader:
        if self._is_list:
            return super()._new_reader()
        return NamedCallReader(self._num_calls, self._new_id, self._accepts, self.heads)


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


class Olmo3Parser(ToolParser):
    """OLMo 3: `NAME(KEY=VALUE, ...)` with literals of Python, a call on each line, between tags."""

    tag = "<function_calls>"
    closing = "</function_calls>"

    def _step_after_call(self) -> bool:
        if not self._reader.ended or self._buffer.lstrip().startswith("<"):
            return self._step_marks((self.closing, State.TEXT))
        if not self._buffer.strip():
            return False
        self._mark = ""
        self._enter(State.CALL)
        return True

    def _new_reader(self) -> Reader:
        return KeywordCallReader(self._num_calls, self._new_id, self._accepts)


TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "cohere2": Cohere2Parser,
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    GENERIC: GenericParser,
    "glm4": Glm4Parser,
    "glm45": Glm45Parser,
    "granite": GraniteParser,
    "hermes": HermesParser,
    "json_call": JsonCallParser,
    "llama3_json": Llama3JsonParser,
    "minimax_m2": MiniMaxM2Parser,
    "mistral": MistralParser,
    "olmo3": Olmo3Parser,
    "phi4_mini_json": Phi4MiniParser,
    "qwen3_coder": Qwen3CoderParser,
    "seed_oss": SeedOssParser,
}


_SIGNS = (
    ("cohere2", ("<|START_ACTION|>",)),
    ("glm45", ("<tool_call>", ARG_KEY)),
    ("seed_oss", ("<seed:tool_call>", FUNCTION)),
    ("minimax_m2", ("<minimax:tool_call>", INVOKE)),
    ("qwen3_coder", ("<tool_call>", FUNCTION, PARAMETER)),
    ("hermes", ("<tool_call>", '"arguments"')),
    ("olmo3", ("<function_calls>", "<functions>")),
    ("deepseek_v3", (CALLS_BEGIN, SEP, "```json")),
    ("deepseek_v31", (CALLS_BEGIN, SEP)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
    ("glm4", ("[gMASK]<sop>", "<|observation|>")),
    ("granite", ("<|start_of_role|>", "<|tool_call|>")),
    ("phi4_mini_json", ("<|tool|>",)),
    ("phi4_mini_json", ("functools[",)),
    ("mistral", ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]")),
)
"""Texts that are all in the chat templates of a format; the first that fits is meant."""


def detect_parser(template_source: str) -> str | None:
    """Return the name of the format that a chat template shows; None if it has no tools, or an unknown format."""
    source = template_source.replace("\\", "")
    if "tools" not in source:
        return None
    return next((name for name, signs in _SIGNS if all(sign in source for sign in signs)), None)
