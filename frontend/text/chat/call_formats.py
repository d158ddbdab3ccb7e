"""The text around the calls of each format, as grammars enforce it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.frontend.text.chat.argument_rules import (
    ArgumentRules,
    glm45_arguments,
    glm47_arguments,
    json_arguments,
    keyword_arguments,
    minimax_m2_arguments,
    qwen3_coder_arguments,
    seed_oss_arguments,
)
from quire.frontend.text.chat.gemma4_arguments import gemma4_arguments
from quire.frontend.text.chat.gemma4_call_reader import QUOTE
from quire.frontend.text.chat.generic_tools import GENERIC
from quire.frontend.text.chat.named_call_reader import ID, NAME
from quire.frontend.text.chat.tag_styles import END_FUNCTION, END_INVOKE, FUNCTION, INVOKE
from quire.frontend.text.chat.tool_parsers import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEP


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The text around calls: `tag` `head` ARGUMENTS `after` `end_tag`, and around all of them `list_tag` `opening` and
    `closing` `list_end_tag`. Without a `separator` there is one call. In `head` `NAME` stands for the function's name,
    and a part that is `ID` for a number. `prose` are the texts that are no calls, in a format without tags; in it
    `NAMES` stands for the functions' names. `is_enforced`: calls follow the schemas even where no tool is strict, since
    no model was trained on the format. `quote` is the mark around texts among the arguments, whose rules call it
    `quote`, and `quoted` a text and the mark after it.
    """

    head: tuple[str, ...] = (f'{{"name": "{NAME}", "arguments": ',)
    after: str = "}"
    arguments: ArgumentRules = json_arguments
    tag: str = ""
    end_tag: str = ""
    separator: str | None = None
    list_tag: str = ""
    opening: str = ""
    closing: str = ""
    list_end_tag: str = ""
    prose: str = r"/[ \n]*[^ \n{\[](.|\n)*/"
    is_enforced: bool = False
    quote: str = ""

    @property
    def mark(self) -> str:
        """The tag before all calls; empty if they begin with the answer."""
        return self.list_tag or self.tag


_DEEPSEEK_V31 = CallFormat(
    head=(NAME, SEP), after="", tag=CALL_BEGIN, end_tag=CALL_END, separator="", list_tag=CALLS_BEGIN,
    list_end_tag=CALLS_END,
)  # fmt: skip

_HERMES = CallFormat(
    head=(f'\n{{"name": "{NAME}", "arguments": ',),
    after="}\n",
    tag="<tool_call>",
    end_tag="</tool_call>",
    separator="\n",
)

FORMATS = {
    "apertus": (
        CallFormat(
            head=(f'{{"{NAME}": ',), list_tag="<|tools_prefix|>", opening="[", separator=", ", closing="]",
            list_end_tag="<|tools_suffix|>",
        ),
    ),
    "cohere2": (
        CallFormat(
            head=('{"tool_call_id": "', ID, f'", "tool_name": "{NAME}", "parameters": '), list_tag="<|START_ACTION|>",
            opening="[\n    ", separator=",\n    ", closing="\n]", list_end_tag="<|END_ACTION|>",
        ),
    ),
    "deepseek_v3": (
        CallFormat(
            head=("function", SEP, f"{NAME}\n```json\n"), after="\n```", tag=CALL_BEGIN, end_tag=CALL_END,
            separator="\n", list_tag=CALLS_BEGIN, list_end_tag=CALLS_END,
        ),
    ),
    "deepseek_v31": (_DEEPSEEK_V31,),
    "gemma4": (
        CallFormat(
            head=(f"call:{NAME}",), after="", arguments=gemma4_arguments, tag="<|tool_call>", end_tag="<tool_call|>",
            separator="", quote=QUOTE,
        ),
    ),
    GENERIC: (replace(_HERMES, is_enforced=True),),
    "glm4": (
        CallFormat(head=(f"{NAME}\n",), after="", prose=r"/(.|\n)+/ & ~/\s*(NAMES)\n\s*\{(.|\n)*/"),
    ),
    "glm45": (
        CallFormat(
            head=(f"{NAME}\n",), after="", arguments=glm45_arguments, tag="<tool_call>", end_tag="</tool_call>",
            separator="\n",
        ),
        CallFormat(
            head=(NAME,), after="", arguments=glm47_arguments, tag="<tool_call>", end_tag="</tool_call>", separator="",
        ),
    ),
    "granite": (CallFormat(list_tag="<|tool_call|>", opening="[", separator=", ", closing="]"),),
    "hermes": (_HERMES,),
    "hunyuan_a13b": (
        CallFormat(
            list_tag="<tool_calls>", opening="[", separator=", ", closing="]", list_end_tag="</tool_calls>",
        ),
    ),
    "json_call": (CallFormat(opening="[", separator=", ", closing="]"),),
    "lfm2": (
        CallFormat(
            head=(f"{NAME}(",), after=")", arguments=keyword_arguments, list_tag="<|tool_call_start|>", opening="[",
            separator=", ", closing="]", list_end_tag="<|tool_call_end|>",
        ),
    ),
    "llama3_json": (CallFormat(head=(f'{{"name": "{NAME}", "parameters": ',), separator="; "),),
    "minimax_m2": (
        CallFormat(
            head=(f'{INVOKE}{NAME}">\n',), after=END_INVOKE, arguments=minimax_m2_arguments, separator="\n",
            list_tag="<minimax:tool_call>", opening="\n", closing="\n", list_end_tag="</minimax:tool_call>",
        ),
    ),
    "mistral": (
        CallFormat(list_tag="[TOOL_CALLS]", opening="[", separator=", ", closing="]"),
        CallFormat(head=(NAME, "[ARGS]"), after="", tag="[TOOL_CALLS]", separator=""),
    ),
    "nemotron_json": (
        CallFormat(list_tag="<TOOLCALL>", opening="[", separator=", ", closing="]", list_end_tag="</TOOLCALL>"),
    ),
    "olmo3": (
        CallFormat(
            head=(f"{NAME}(",), after=")", arguments=keyword_arguments, separator="\n", list_tag="<function_calls>",
            opening="\n", closing="\n", list_end_tag="</function_calls>",
        ),
    ),
    "phi4_mini_json": (CallFormat(list_tag="functools", opening="[", separator=", ", closing="]"),),
    "qwen3_coder": (
        CallFormat(
            head=(f"\n{FUNCTION}{NAME}>\n",), after=f"{END_FUNCTION}\n", arguments=qwen3_coder_arguments,
            tag="<tool_call>", end_tag="</tool_call>", separator="\n",
        ),
        CallFormat(head=(f"{NAME}>\n",), after=END_FUNCTION, arguments=qwen3_coder_arguments, tag=FUNCTION),
    ),
    "seed_oss": (
        CallFormat(
            head=(f"\n{FUNCTION}{NAME}>\n",), after=f"{END_FUNCTION}\n", arguments=seed_oss_arguments,
            tag="<seed:tool_call>", end_tag="</seed:tool_call>", separator="\n",
        ),
    ),
}  # fmt: skip
"""The ways in which calls may be written, by the parser that reads them. The first is that of a forced answer, with
others that have the same mark.
"""
