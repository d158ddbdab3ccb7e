"""Grammars of answers in the harmony format, in the Lark dialect of llguidance."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping

from quire.frontend.text.chat.answer_grammar import NO_TOKENS, literal, tag, text_up_to
from quire.frontend.text.chat.argument_rules import json_arguments
from quire.frontend.text.chat.harmony import CHANNEL, CONSTRAIN, END, FUNCTIONS, MARKS, MESSAGE, START
from quire.frontend.text.chat.tools import ToolUse


class PromptEnd(enum.Enum):
    """The part of a message that a prompt ends with."""

    HEADER = enum.auto()
    THOUGHT = enum.auto()
    CONTENT = enum.auto()


def prompt_end(prompt: str) -> PromptEnd:
    """Return the part of a message that `prompt` ends with."""
    head, is_message, _ = prompt.rpartition(START)[2].partition(MESSAGE)
    if not is_message:
        return PromptEnd.HEADER
    return PromptEnd.THOUGHT if f"{CHANNEL}analysis" in head else PromptEnd.CONTENT


def harmony_grammar(
    prompt: str, use: ToolUse | None, content: str | None = None, special_tokens: Mapping[str, int] = NO_TOKENS
) -> str | None:
    """Return a grammar of the answers to `prompt` that `use` allows; None if all are allowed.

    The parameters are those of `tool_grammar`. An answer has any number of thoughts, and then the content or one call,
    with which the model's turn ends. Before it the model may also write to the user, if `content` is free and no call
    is forced.
    """
    tools = () if use is None else use.callable_tools
    is_forced = use is not None and use.forced and bool(tools)
    if content is None and not is_forced and not any(tool.strict for tool in tools):
        return None
    rules = _Rules(special_tokens)
    last = "call" if is_forced else "final | call" if tools else "final"
    starts = {
        PromptEnd.HEADER: "messages",
        PromptEnd.THOUGHT: "thought next messages",
        PromptEnd.CONTENT: f"{rules.tag(END)} next messages" if is_forced else "words",
    }
    return rules.write(
        f"start: {starts[prompt_end(prompt)]}",
        f"messages: (({'analysis' if is_forced or content else 'analysis | preamble'}) next)* ({last})",
        *([] if is_forced else rules.content(content)),
        *([] if use is None else rules.calls(use)),
    )


class _Rules:
    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special = special_tokens

    def write(self, *rules: str) -> str:
        """Return a grammar of `rules` and those that they refer to."""
        channel, message, constrain = self.tag(CHANNEL), self.tag(MESSAGE), self.tag(CONSTRAIN)
        shared = [
            f'next: {self.tag(START)} "assistant"',
            f'analysis: {channel} "analysis" {message} thought',
            *text_up_to("thought", END, self._special),
            f'json: " "? {constrain} "json" | " json"',
        ]
        return "\n".join([*rules, *shared]) + "\n"

    def content(self, content: str | None) -> list[str]:
        """Return rules for the content: the right side of a rule, or None for all texts."""
        channel, message = self.tag(CHANNEL), self.tag(MESSAGE)
        rules = [f'final: {channel} "final" json? {message} words', f"words: {content or 'WORDS?'}"]
        if content is not None:
            return rules
        marks = [mark for mark in sorted(MARKS) if mark not in self._special]
        hidden = "|".join(re.escape(mark) for mark in marks)
        free = rf" & ~/(.|\n)*({hidden})(.|\n)*/" if marks else ""
        preamble = f'preamble: {channel} "commentary" {message} remark'
        return [*rules, rf"WORDS: /(.|\n)+/{free}", preamble, *text_up_to("remark", END, self._special)]

    def calls(self, use: ToolUse) -> list[str]:
        """Return the rules of a call, with the recipient before or after the channel; none if no tool is callable."""
        tools = use.callable_tools
        if not tools:
            return []
        channel = f'{self.tag(CHANNEL)} ("commentary" | "analysis")'
        rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}"]
        for index, tool in enumerate(tools):
            to = literal(f" to={FUNCTIONS}{tool.name}")
            heads = f"({to} {channel} | {channel} {to})"
            rules.append(f"call_{index}: {heads} json? {self.tag(MESSAGE)} arguments_{index}")
            rules += json_arguments(f"arguments_{index}", tool, f"tools[{use.tools.index(tool)}].function.parameters")
        return rules

    def tag(self, mark: str) -> str:
        """Return a mark as the grammar names it."""
        return tag(mark, self._special)
