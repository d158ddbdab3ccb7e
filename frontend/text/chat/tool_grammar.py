"""Grammars of tool calls, in the Lark dialect of llguidance, and the errors that their schemas cause."""

from __future__ import annotations

import json
import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from quire.frontend.errors import RequestError
from quire.frontend.text.chat.answer_grammar import literal, tag, text_up_to, thinking, thinking_rules
from quire.frontend.text.chat.reasoning import THINK, AnswerStart, ReasoningFormat
from quire.frontend.text.chat.tools import Tool, ToolError, ToolUse
from quire.protocol.messages import ErrorKind

# The style of json.dumps and of the models. With free white space, a confused model may write nothing else.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Keywords with which a schema's properties depend on more than `properties`.
COMPOSING = {"$ref", "allOf", "anyOf", "oneOf", "additionalProperties", "patternProperties", "unevaluatedProperties"}


@dataclass(frozen=True, slots=True)
class _Format:
    """The text around calls: `tag` `before` call `after` `end_tag`, and around all of them `list_tag` `opening` and
    `closing` `list_end_tag`. A call has the keys `call_id`, if there is one, `name` and `arguments`;
    without `name` it is a line with the function's name, and the object of the arguments.
    """

    call_id: str = ""
    name: str = "name"
    arguments: str = "arguments"
    tag: str = ""
    before: str = ""
    after: str = ""
    end_tag: str = ""
    separator: str = ""
    list_tag: str = ""
    opening: str = ""
    closing: str = ""
    list_end_tag: str = ""


FORMATS = {
    "cohere2": _Format(
        call_id="tool_call_id", name="tool_name", arguments="parameters", list_tag="<|START_ACTION|>",
        opening="[\n    ", separator=",\n    ", closing="\n]", list_end_tag="<|END_ACTION|>",
    ),
    "glm4": _Format(name=""),
    "granite": _Format(list_tag="<|tool_call|>", opening="[", separator=", ", closing="]"),
    "hermes": _Format(tag="<tool_call>", before="\n", after="\n", end_tag="</tool_call>", separator="\n"),
    "json_call": _Format(opening="[", separator=", ", closing="]"),
    "llama3_json": _Format(arguments="parameters", separator="; "),
    "phi4_mini_json": _Format(list_tag="functools", opening="[", separator=", ", closing="]"),
}  # fmt: skip


def tool_grammar(
    use: ToolUse,
    parser: str,
    start: AnswerStart = AnswerStart.ANSWER,
    special_tokens: Container[str] = (),
    content: str | None = None,
    thoughts: ReasoningFormat = THINK,
) -> str | None:
    """Return a grammar of the answers that `use` allows, with calls in the format of `parser`; None if all are allowed.

    The arguments of forced calls, and of all calls if a tool is strict, follow the tools' schemas; keywords that
    llguidance does not support are ignored, unless the tool is strict. `start` leaves room to think first.
    `thoughts` has the marks around thoughts.
    `special_tokens` are the texts that the tokenizer has as special tokens. `content`, the right side of a rule,
    constrains an answer that calls no tool; a forced call has no content.
    """
    tools = use.callable_tools
    if not tools or not (use.forced or content is not None or any(tool.strict for tool in tools)):
        return None
    return _Writer(FORMATS[parser], use, special_tokens).write(start, content, thoughts)


def rejected_schema(use: ToolUse) -> ToolError | None:
    """Return an error for the first tool whose schema llguidance rejects, to explain the engine's rejection."""
    from llguidance import LLMatcher

    callable_tools = use.callable_tools
    for index, tool in enumerate(use.tools):
        if tool not in callable_tools:
            continue  # not part of the grammar
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(_schema(tool)))
        is_rejected, messages = LLMatcher.validate_grammar_with_warnings(grammar)
        if is_rejected:
            advice = ", or omit strict to ignore unsupported keywords" if tool.strict else ""
            where = f"tools[{index}].function.parameters"
            return ToolError(where, f"cannot be enforced: {messages[0]}; change the schema{advice}")
    return None


class _Writer:
    def __init__(self, form: _Format, use: ToolUse, special_tokens: Container[str]) -> None:
        self._format = form
        self._use = use
        self._special = special_tokens

    def write(self, start: AnswerStart, content: str | None, thoughts: ReasoningFormat) -> str:
        """Return the rules, `start` first."""
        tools = self._use.callable_tools
        form = self._format
        rules = [
            f"start: {thinking(start, self._special, thoughts)} {'calls' if self._use.forced else 'answer'}",
            f"calls: {self._tag(form.list_tag)} {literal(form.opening)} {self._tag(form.tag)} rest",
            f"rest: call {self._more()} {literal(form.closing)} {self._tag(form.list_end_tag)}",
            f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}",
            *thinking_rules(start, self._special, thoughts),
            *(["ID: /[0-9]{1,2}/"] if form.call_id else []),
        ]
        if not self._use.forced:
            rules += self._answer() if content is None else ["answer: words | calls", f"words: {content}"]
        for index, tool in enumerate(tools):
            rules += self._call(index, tool)
        return "\n".join(rules) + "\n"

    def _answer(self) -> list[str]:
        """Return rules for text, calls, or both where a tag separates them; else the text must not look like a call."""
        if not self._format.name:
            names = "|".join(re.escape(tool.name) for tool in self._use.callable_tools)
            return ["answer: PROSE? | calls", rf"PROSE: /(.|\n)+/ & ~/\s*({names})\n\s*\{{(.|\n)*/"]
        mark = self._format.tag or self._format.list_tag
        if not mark:
            return ["answer: PROSE? | calls", r"PROSE: /[ \n]*[^ \n{\[](.|\n)*/"]
        lead = f"answer: WORDS | lead {literal(self._format.opening)} rest"
        return [lead, r"WORDS: /(.|\n)*/", *text_up_to("lead", mark, self._special)]

    def _more(self) -> str:
        if not (self._use.parallel and self._format.separator):
            return ""
        return f"({literal(self._format.separator)} {self._tag(self._format.tag)} call)*"

    def _call(self, index: int, tool: Tool) -> list[str]:
        form = self._format
        head = f'"{form.name}": {json.dumps(tool.name)}, "{form.arguments}": '
        before, after = literal(f"{form.before}{{{head}"), literal("}" + form.after)
        if not form.name:
            before, after = literal(f"{tool.name}\n"), ""
        if form.call_id:
            before = literal(f'{form.before}{{"{form.call_id}": "') + " ID " + literal(f'", {head}')
        return [
            f"call_{index}: {before} arguments_{index} {after} {self._tag(self._format.end_tag)}",
            f"arguments_{index}: %json {json.dumps(_schema(tool))}",
        ]

    def _tag(self, mark: str) -> str:
        return tag(mark, self._special)


def _schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of the arguments, closed to unnamed properties, which the model would invent."""
    schema = dict(tool.parameters or {"type": "object"})
    if not COMPOSING & set(schema):
        schema["additionalProperties"] = False
    schema["x-guidance"] = {**JSON_STYLE, "lenient": not tool.strict}
    return schema


_TOOK_TOO_LONG = "--grammar-timeout"  # in the engine's message


def rejected_grammar(error: Exception) -> str | None:
    """Return the reason why the engine rejected a grammar; None if `error` is something else."""
    if not isinstance(error, RequestError) or error.kind is not ErrorKind.INVALID:
        return None
    field, _, reason = str(error).partition(" can't be used: ")
    return reason if reason and "structured_outputs." in field else None


def tool_at_fault(error: Exception, tools: ToolUse | None) -> ToolError | None:
    """Return an error for the tool whose schema made the engine reject the grammar; None if it is not known.

    It may take as long as it took the engine, so don't call it on an event loop. If compiling the grammar timed out in
    the engine, the tool is not known.
    """
    reason = rejected_grammar(error)
    return None if tools is None or reason is None or _TOOK_TOO_LONG in reason else rejected_schema(tools)
