"""Tool parsers: the formats in which models write tool calls."""

from __future__ import annotations

import re
import secrets

from quire.frontend.text.chat.events import Event
from quire.frontend.text.chat.gemma4_call_reader import Gemma4CallReader
from quire.frontend.text.chat.generic_tools import GENERIC
from quire.frontend.text.chat.keyword_parsers import Lfm2Parser, Olmo3Parser
from quire.frontend.text.chat.line_call_reader import LineCallReader
from quire.frontend.text.chat.list_parsers import (
    Cohere2Parser,
    GraniteParser,
    HunyuanA13BParser,
    ListParser,
    NemotronJsonParser,
    Phi4MiniParser,
)
from quire.frontend.text.chat.marked_calls import ALPHANUMERIC, Reader, State, ToolParser
from quire.frontend.text.chat.named_call_reader import ID, NAME, NamedCallReader
from quire.frontend.text.chat.scanning import match_mark
from quire.frontend.text.chat.tag_parsers import Glm45Parser, MiniMaxM2Parser, Qwen3CoderParser, SeedOssParser
from quire.frontend.text.chat.tag_styles import ARG_KEY, FUNCTION, INVOKE, PARAMETER


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


class MistralParser(ListParser):
    """Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or since its eleventh tokenizer
    `[TOOL_CALLS]NAME[ARGS]{...}` for each call, maybe with `[CALL_ID]` and an id after the name.
    """

    tag = "[TOOL_CALLS]"
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


class ApertusParser(ListParser):
    """Apertus: `[{"NAME": {...}}, ...]` between tags."""

    tag = "<|tools_prefix|>"
    end_tag = "<|tools_suffix|>"

    def _new_reader(self) -> Reader:
        head = ("{", '"', NAME, '"', ":")
        return NamedCallReader(self._num_calls, self._new_id, self._accepts, (head,), tail=("}",))


class Gemma4Parser(ToolParser):
    """Gemma 4: `call:NAME{KEY:VALUE,...}` in its own notation of values, between tags."""

    tag = "<|tool_call>"
    closing = "<tool_call|>"

    def _new_reader(self) -> Reader:
        return Gemma4CallReader(self._num_calls, self._new_id, self._accepts)


TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "apertus": ApertusParser,
    "cohere2": Cohere2Parser,
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "gemma4": Gemma4Parser,
    GENERIC: GenericParser,
    "glm4": Glm4Parser,
    "glm45": Glm45Parser,
    "granite": GraniteParser,
    "hermes": HermesParser,
    "hunyuan_a13b": HunyuanA13BParser,
    "json_call": JsonCallParser,
    "lfm2": Lfm2Parser,
    "llama3_json": Llama3JsonParser,
    "minimax_m2": MiniMaxM2Parser,
    "mistral": MistralParser,
    "nemotron_json": NemotronJsonParser,
    "olmo3": Olmo3Parser,
    "phi4_mini_json": Phi4MiniParser,
    "qwen3_coder": Qwen3CoderParser,
    "seed_oss": SeedOssParser,
}


_SIGNS = (
    ("apertus", ("<|tools_prefix|>",)),
    ("gemma4", ("<|tool_call>", "call:")),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("List of tools: ", "<|im_start|>")),
    ("nemotron_json", ("<TOOLCALL>[", '"arguments"')),
    ("hunyuan_a13b", ("<tool_calls>[", '"arguments"')),
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
_TOOLS = re.compile(r"(?<![a-z])tools")  # and not those of Python's functools


def detect_parser(template_source: str) -> str | None:
    """Return the name of the format that a chat template shows; None if it has no tools, or an unknown format."""
    source = template_source.replace("\\", "")
    if _TOOLS.search(source) is None:
        return None
    return next((name for name, signs in _SIGNS if all(sign in source for sign in signs)), None)
