"""The format in which a model writes thoughts and tool calls, and the parser and grammar that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from quire.frontend.text.chat.answer_grammar import after_thinking, answer_rule
from quire.frontend.text.chat.assistant import AssistantParser
from quire.frontend.text.chat.reasoning import (
    REASONING_PARSERS,
    THINK,
    AnswerStart,
    ReasoningFormat,
    ReasoningParser,
    answer_start,
    detect_reasoning,
)
from quire.frontend.text.chat.tool_grammar import tool_grammar
from quire.frontend.text.chat.tool_parsers import TOOL_PARSERS, detect_parser, new_call_id
from quire.frontend.text.chat.tools import ToolError, ToolUse
from quire.protocol.messages import MAX_CONSTRAINT, SamplingParams, StructuredOutputs


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Names of the parsers of a model's answers, None where it has none; `special_tokens` are the tokenizer's."""

    tool_parser: str | None = None
    reasoning_parser: str | None = None
    special_tokens: frozenset[str] = frozenset()

    @classmethod
    def detect(
        cls,
        template_source: str,
        *,
        added_tokens: Iterable[str] = (),
        special_tokens: Iterable[str] = (),
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> AnswerFormat:
        """Detect the format from a chat template, unless the parsers are named; "none" turns a parser off.

        Raises ValueError for an unknown name.
        """
        _check_name("tool_parser", tool_parser, TOOL_PARSERS)
        _check_name("reasoning_parser", reasoning_parser, REASONING_PARSERS)
        tools = detect_parser(template_source) if tool_parser is None else tool_parser
        reasoning = detect_reasoning(template_source, added_tokens) if reasoning_parser is None else reasoning_parser
        return cls(
            None if tools == "none" else tools, None if reasoning == "none" else reasoning, frozenset(special_tokens)
        )

    @property
    def reads_special_tokens(self) -> bool:
        """True if marks are special tokens, so that answers must be decoded with `skip_special_tokens=False`."""
        marks = set() if self.tool_parser is None else TOOL_PARSERS[self.tool_parser].marks()
        if self.reasoning_parser is not None:
            marks |= self._thoughts.marks
        return not marks.isdisjoint(self.special_tokens)

    def parser(
        self, prompt: str, tools: ToolUse | None = None, new_id: Callable[[], str] = new_call_id
    ) -> AssistantParser:
        """Return a parser of one answer to the rendered `prompt`; `new_id` makes the ids of calls.

        Raises ToolError, as `grammar` does.
        """
        name = self._tool_parser(tools)
        calls = None
        if tools is not None and name is not None:
            calls = TOOL_PARSERS[name]({tool.name for tool in tools.callable_tools}, new_id)
        thoughts = (
            None if self.reasoning_parser is None else ReasoningParser(self._answer_start(prompt), self._thoughts)
        )
        parallel, forced = tools is None or tools.parallel, tools is not None and tools.forced
        return AssistantParser(calls, thoughts, parallel, only_calls=forced)

    def params(self, params: SamplingParams, prompt: str, tools: ToolUse | None = None) -> SamplingParams:
        """Return `params`, already checked, adapted to an answer to the rendered `prompt` that a parser will read.

        They keep the marks in the text and constrain it to the tools. `structured_outputs` constrains the content only:
        the model may think first, and call a tool instead. A forced call has no content to constrain.
        Raises ToolError, as `grammar` does.
        """
        return msgspec.structs.replace(
            params,
            skip_special_tokens=params.skip_special_tokens and not self.reads_special_tokens,
            structured_outputs=self._constraint(params.structured_outputs, prompt, tools),
        )

    def grammar(self, prompt: str, tools: ToolUse | None, content: str | None = None) -> str | None:
        """Return the Lark grammar that tools impose on the answer, None if they impose none.

        `content`, the right side of a rule, constrains an answer that calls no tool.
        Raises ToolError if the model may choose among tools but has no known format for calls.
        """
        name = self._tool_parser(tools)
        if tools is None or name is None:
            return None
        return tool_grammar(tools, name, self._answer_start(prompt), self.special_tokens, content, self._thoughts)

    def after_thinking(self, prompt: str, body: str) -> str | None:
        """Return the Lark grammar of an answer that may or must think before `body`, the right side of a rule.

        None if the answer begins at once, so that `body` is all there is.
        """
        start = self._answer_start(prompt)
        return None if start is AnswerStart.ANSWER else after_thinking(body, start, self.special_tokens, self._thoughts)

    def _constraint(
        self, structured: StructuredOutputs | None, prompt: str, tools: ToolUse | None
    ) -> StructuredOutputs | None:
        """Return the constraint extended by thoughts and calls; None if every answer is allowed."""
        if structured is None:
            grammar = self.grammar(prompt, tools)
        elif tools is not None and tools.callable_tools:
            grammar = self.grammar(prompt, tools, answer_rule(structured))
        elif self._answer_start(prompt) is AnswerStart.ANSWER:
            return structured
        else:
            grammar = self.after_thinking(prompt, answer_rule(structured))
        if tools is not None and grammar is not None and len(grammar) > MAX_CONSTRAINT:
            raise ToolError(
                "tools",
                f"need a grammar of {len(grammar)} characters for their calls, more than {MAX_CONSTRAINT}; "
                "give fewer tools, or shorter schemas",
            )
        return None if grammar is None else StructuredOutputs(grammar=grammar)

    @property
    def _thoughts(self) -> ReasoningFormat:
        return THINK if self.reasoning_parser is None else REASONING_PARSERS[self.reasoning_parser]

    def _answer_start(self, prompt: str) -> AnswerStart:
        return AnswerStart.ANSWER if self.reasoning_parser is None else answer_start(self.reasoning_parser, prompt)

    def _tool_parser(self, tools: ToolUse | None) -> str | None:
        if tools is None or tools.choice.mode == "none":
            return None
        if self.tool_parser is None and not tools.forced:
            raise ToolError(
                "tool_choice",
                "is 'auto', but the chat template of this model shows no known format of tool calls; "
                "set it to 'required', to a function or to 'none', or name the model's format with tool_call_parser "
                "(--tool-call-parser of the server)",
            )
        return self.tool_parser or "json_call"


def _check_name(option: str, name: str | None, known: Iterable[str]) -> None:
    allowed = ["none", *sorted(known)]
    if name is not None and name not in allowed:
        raise ValueError(f"{option}={name!r} is not known; give one of {', '.join(allowed)}")
