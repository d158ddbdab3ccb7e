"""Grammars of tool calls, in the Lark dialect of llguidance, and the errors that their schemas cause."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence

from quire.frontend.errors import RequestError
from quire.frontend.text.chat.answer_grammar import NO_TOKENS, literal, tag, text_up_to, thinking, thinking_rules
from quire.frontend.text.chat.argument_rules import closed_schema
from quire.frontend.text.chat.call_formats import FORMATS, CallFormat
from quire.frontend.text.chat.named_call_reader import ID, NAME
from quire.frontend.text.chat.reasoning import THINK, AnswerStart, ReasoningFormat
from quire.frontend.text.chat.schema_trial import rejected_of
from quire.frontend.text.chat.tools import Tool, ToolError, ToolUse
from quire.protocol.messages import ErrorKind


def tool_grammar(
    use: ToolUse,
    parser: str,
    start: AnswerStart = AnswerStart.ANSWER,
    special_tokens: Mapping[str, int] = NO_TOKENS,
    content: str | None = None,
    thoughts: ReasoningFormat = THINK,
) -> str | None:
    """Return a grammar of the answers that `use` allows, with calls in the format of `parser`; None if all are allowed.

    The arguments of forced calls, and of all calls if a tool is strict or the format is enforced, follow the tools'
    schemas; keywords that llguidance does not support are ignored, unless the tool is strict. `start` leaves room to
    think first. `thoughts` has the marks around thoughts. `special_tokens` are the ids of the tokenizer's special
    tokens, by their texts. `content`, the right side of a rule, constrains an answer that calls no tool; a forced call
    has no content.
    """
    tools = use.callable_tools
    is_enforced = any(form.is_enforced for form in FORMATS[parser]) or any(tool.strict for tool in tools)
    if not tools or not (use.forced or content is not None or is_enforced):
        return None
    return _Writer(FORMATS[parser], use, special_tokens).write(start, content, thoughts)


def rejected_schema(use: ToolUse) -> ToolError | None:
    """Return an error for the first tool whose schema llguidance rejects, to explain the engine's rejection."""
    tried = [(index, tool) for index, tool in enumerate(use.tools) if tool in use.callable_tools]
    verdict = rejected_of([json.dumps(closed_schema(tool)) for _, tool in tried])
    if verdict is None:
        return None
    index, tool = tried[verdict.index]
    advice = ", or omit strict to ignore unsupported keywords" if tool.strict else ""
    return ToolError(
        f"tools[{index}].function.parameters", f"cannot be enforced: {verdict.error}; change the schema{advice}"
    )


class _Writer:
    def __init__(self, forms: Sequence[CallFormat], use: ToolUse, special_tokens: Mapping[str, int]) -> None:
        self._forms = forms
        self._use = use
        self._special = special_tokens
        self._arguments: dict[str, list[str]] = {}  # rules by the name of the first

    def write(self, start: AnswerStart, content: str | None, thoughts: ReasoningFormat) -> str:
        """Return the rules, `start` first."""
        marks = list(dict.fromkeys(form.mark for form in self._forms))
        rules = [
            f"start: {thinking(start, self._special, thoughts)} {'calls' if self._use.forced else 'answer'}",
            f"calls: {self._tag(marks[0])} after_0",
            *thinking_rules(start, self._special, thoughts),
        ]
        for quote in {form.quote for form in self._forms if form.quote}:
            rules += [f"quote: {self._tag(quote)}", *text_up_to("quoted", quote, self._special)]
        if not self._use.forced:
            rules += self._answer(marks) if content is None else ["answer: words | calls", f"words: {content}"]
        for index, mark in enumerate(marks):
            forms = [f"form_{number}" for number, form in enumerate(self._forms) if form.mark == mark]
            rules.append(f"after_{index}: {' | '.join(forms)}")
        for number, form in enumerate(self._forms):
            rules += self._calls(number, form)
        return "\n".join([*rules, *itertools.chain(*self._arguments.values()), "ID: /[0-9]{1,2}/"]) + "\n"

    def _answer(self, marks: list[str]) -> list[str]:
        """Return rules for text, calls, or both where a tag separates them; else the text must not look like a call."""
        if marks == [""]:
            names = "|".join(re.escape(tool.name) for tool in self._use.callable_tools)
            return ["answer: PROSE? | calls", f"PROSE: {self._forms[0].prose.replace('NAMES', names)}"]
        ways = ["WORDS", *(f"lead_{index} after_{index}" for index in range(len(marks)))]
        leads = [text_up_to(f"lead_{index}", mark, self._special) for index, mark in enumerate(marks)]
        return [f"answer: {' | '.join(ways)}", r"WORDS: /(.|\n)*/", *itertools.chain(*leads)]

    def _calls(self, number: int, form: CallFormat) -> list[str]:
        """Return the rules of all calls in a form, after its mark."""
        call, tools = f"call_{number}", self._use.callable_tools
        first = self._tag(form.tag) if form.list_tag else ""
        more = ""
        if self._use.parallel and form.separator is not None:
            more = f"({literal(form.separator)} {self._tag(form.tag)} {call})*"
        end = f"{literal(form.closing)} {self._tag(form.list_end_tag)}"
        return [
            f"form_{number}: {literal(form.opening)} {first} {call} {more} {end}",
            f"{call}: {' | '.join(f'{call}_{index}' for index in range(len(tools)))}",
            *(self._call(f"{call}_{index}", tool, form) for index, tool in enumerate(tools)),
        ]

    def _call(self, rule: str, tool: Tool, form: CallFormat) -> str:
        head = " ".join(part if part == ID else self._tag(part.replace(NAME, tool.name)) for part in form.head)
        index = self._use.tools.index(tool)
        arguments = f"{form.arguments.__name__}_{index}"
        if arguments not in self._arguments:
            self._arguments[arguments] = form.arguments(arguments, tool, f"tools[{index}].function.parameters")
        return f"{rule}: {head} {arguments} {literal(form.after)} {self._tag(form.end_tag)}"

    def _tag(self, mark: str) -> str:
        return tag(mark, self._special)


_TOOK_TOO_LONG = "--grammar-timeout"  # in the engine's message


def rejected_grammar(error: Exception) -> str | None:
    """Return the reason why the engine rejected a grammar; None if `error` is something else."""
    if not isinstance(error, RequestError) or error.kind is not ErrorKind.INVALID:
        return None
    field, _, reason = str(error).partition(" can't be used: ")
    return reason if reason and "structured_outputs." in field else None


def tool_at_fault(error: Exception, tools: ToolUse | None) -> ToolError | None:
    """Return an error for the tool whose schema made the engine reject the grammar; None if it is not known.

    It starts a process and may take as long as it took the engine, so don't call it on an event loop. If compiling the
    grammar timed out in the engine, the tool is not known.
    """
    reason = rejected_grammar(error)
    return None if tools is None or reason is None or _TOOK_TOO_LONG in reason else rejected_schema(tools)
