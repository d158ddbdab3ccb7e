"""Grammars that force a model's tool calls, in the Lark dialect of llguidance."""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from quire.frontend.text.chat.reasoning import Beginning
from quire.frontend.text.chat.thinking_grammar import literal, tag, text_up_to, thinking, thinking_rules
from quire.frontend.text.chat.tools import Tool, ToolError, ToolUse

# As json.dumps and the models write it. Free white space would let a model that is lost write nothing else.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# What makes a schema's properties depend on more than `properties`.
COMPOSING = {"$ref", "allOf", "anyOf", "oneOf", "additionalProperties", "patternProperties", "unevaluatedProperties"}


@dataclass(frozen=True, slots=True)
class _Format:
    """Where calls of a format stand: `tag` `before` call `after`, which `opening` and `closing` enclose all."""

    arguments: str = "arguments"
    tag: str = ""
    before: str = ""
    after: str = ""
    end_tag: str = ""
    separator: str = ""
    opening: str = ""
    closing: str = ""


FORMATS = {
    "hermes": _Format(tag="<tool_call>", before="\n", after="\n", end_tag="</tool_call>", separator="\n"),
    "json_call": _Format(opening="[", separator=", ", closing="]"),
    "llama3_json": _Format(arguments="parameters", separator="; "),
}


def tool_grammar(
    use: ToolUse,
    parser: str,
    begins: Beginning = Beginning.ANSWER,
    special_tokens: Container[str] = (),
    words: str | None = None,
) -> str | None:
    """A grammar of the answers that `use` allows, with calls as `parser` reads them; None if all are allowed.

    Forced calls, and words or calls if a tool is strict, have arguments of the tools' schemas; keywords that
    llguidance does not know are passed over, unless the tool is strict. `begins` leaves room to think first.
    `special_tokens` are the texts that are special tokens of the tokenizer. `words`, the right side of a rule, is what
    an answer must be that calls nothing; a forced call has no words.
    """
    tools = use.callable_tools
    if not tools or not (use.forced or words is not None or any(tool.strict for tool in tools)):
        return None
    return _Writer(FORMATS[parser], use, special_tokens).write(begins, words)


def refused_schema(use: ToolUse) -> ToolError | None:
    """The first tool whose schema llguidance refuses, and why: to tell, once the engine has refused a grammar."""
    from llguidance import LLMatcher

    callable_tools = use.callable_tools
    for index, tool in enumerate(use.tools):
        if tool not in callable_tools:
            continue  # it is in no grammar
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(_schema(tool)))
        refused, messages = LLMatcher.validate_grammar_with_warnings(grammar)
        if refused:
            advice = ", or leave strict out to pass over what is not supported" if tool.strict else ""
            where = f"tools[{index}].function.parameters"
            return ToolError(where, f"cannot be followed: {messages[0]}; change the schema{advice}")
    return None


class _Writer:
    def __init__(self, form: _Format, use: ToolUse, special_tokens: Container[str]) -> None:
        self._format = form
        self._use = use
        self._special = special_tokens

    def write(self, begins: Beginning, words: str | None) -> str:
        """The rules, `start` first."""
        tools = self._use.callable_tools
        form = self._format
        rules = [
            f"start: {thinking(begins, self._special)} {'calls' if self._use.forced else 'answer'}",
            f"calls: {literal(form.opening)} {self._tag(form.tag)} rest",
            f"rest: call {self._more()} {literal(form.closing)}",
            f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}",
            *thinking_rules(begins, self._special),
        ]
        if not self._use.forced:
            rules += self._answer() if words is None else ["answer: words | calls", f"words: {words}"]
        for index, tool in enumerate(tools):
            rules += self._call(index, tool)
        return "\n".join(rules) + "\n"

    def _answer(self) -> list[str]:
        """Words, or calls after words where a tag tells them apart, or else words that do not look like a call."""
        mark = self._format.tag
        if not mark:
            return ["answer: PROSE? | calls", r"PROSE: /[ \n]*[^ \n{\[](.|\n)*/"]
        return ["answer: WORDS | lead rest", r"WORDS: /(.|\n)*/", *text_up_to("lead", mark, self._special)]

    def _more(self) -> str:
        if not self._use.parallel:
            return ""
        return f"({literal(self._format.separator)} {self._tag(self._format.tag)} call)*"

    def _call(self, index: int, tool: Tool) -> list[str]:
        head = f'{{"name": {json.dumps(tool.name)}, "{self._format.arguments}": '
        before, after = literal(self._format.before + head), literal("}" + self._format.after)
        return [
            f"call_{index}: {before} arguments_{index} {after} {self._tag(self._format.end_tag)}",
            f"arguments_{index}: %json {json.dumps(_schema(tool))}",
        ]

    def _tag(self, mark: str) -> str:
        return tag(mark, self._special)


def _schema(tool: Tool) -> dict[str, Any]:
    """The schema of the arguments, closed to properties that it does not name: the model would make them up."""
    schema = dict(tool.parameters or {"type": "object"})
    if not COMPOSING & set(schema):
        schema["additionalProperties"] = False
    schema["x-guidance"] = {**JSON_STYLE, "lenient": not tool.strict}
    return schema
