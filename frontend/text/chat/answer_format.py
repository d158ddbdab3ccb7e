"""The format in which a model writes thoughts and tool calls, and the parser and grammar that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from quire.frontend.text.chat import harmony
from quire.frontend.text.chat.answer_grammar import NO_TOKENS, after_thinking, answer_rule
from quire.frontend.text.chat.assistant import AssistantParser
from quire.frontend.text.chat.generic_tools import GENERIC
from quire.frontend.text.chat.harmony_grammar import PromptEnd, harmony_grammar, prompt_end
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
from quire.frontend.text.chat.tool_parsers import TOOL_PARSERS, detect_parser
from quire.frontend.text.chat.tools import ToolError, ToolUse
from quire.protocol.messages import MAX_CONSTRAINT, SamplingParams, StructuredOutputs

TOOL_PARSER_NAMES = (*TOOL_PARSERS, harmony.TOOL_PARSER)
REASONING_PARSER_NAMES = (*REASONING_PARSERS, harmony.REASONING_PARSER)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Names of the parsers of a model's answers, None where it has none; `special_tokens` are the ids of the
    tokenizer's special tokens, by their texts. `template_has_tools`: the chat template describes the tools, whatever
    the format of calls.

    In the harmony format one parser reads thoughts and calls, so that either of its names stands for it.
    """

    tool_parser: str | None = None
    reasoning_parser: str | None = None
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    template_has_tools: bool = False

    @classmethod
    def detect(
        cls,
        template_source: str,
        *,
        added_tokens: Iterable[str] = (),
        special_tokens: Mapping[str, int] = NO_TOKENS,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> AnswerFormat:
        """Detect the format from a chat template, unless the parsers are named; "none" turns a parser off.

        Tools have the generic format where the template shows no known one.

        Raises ValueError for an unknown name, or two that don't go together.
        """
        _check_name("tool_parser", tool_parser, TOOL_PARSER_NAMES)
        _check_name("reasoning_parser", reasoning_parser, REASONING_PARSER_NAMES)
        tools, reasoning = tool_parser, reasoning_parser
        if _are_harmony(tool_parser, reasoning_parser, template_source):
            tools, reasoning = tools or harmony.TOOL_PARSER, reasoning or harmony.REASONING_PARSER
        tools = detect_parser(template_source) or GENERIC if tools is None else tools
        reasoning = detect_reasoning(template_source, added_tokens) if reasoning is None else reasoning
        return cls(None if tools == "none" else tools, None if reasoning == "none" else reasoning, special_tokens)

    @property
    def is_harmony(self) -> bool:
        """True for the harmony format of gpt-oss."""
        return self.tool_parser == harmony.TOOL_PARSER or self.reasoning_parser == harmony.REASONING_PARSER

    @property
    def describes_tools(self) -> bool:
        """True if prompts must describe tools in the generic format, which the chat template does not."""
        return self.tool_parser == GENERIC and not self.template_has_tools

    @property
    def reads_special_tokens(self) -> bool:
        """True if marks are special tokens, so that answers must be decoded with `skip_special_tokens=False`."""
        if self.is_harmony:
            return not harmony.MARKS.isdisjoint(self.special_tokens)
        marks = set() if self.tool_parser is None else TOOL_PARSERS[self.tool_parser].marks()
        if self.reasoning_parser is not None:
            marks |= self._thoughts.marks
        return not marks.isdisjoint(self.special_tokens)

    def parser(
        self, prompt: str, tools: ToolUse | None = None, new_id: Callable[[], str] | None = None
    ) -> AssistantParser:
        """Return a parser of one answer to the rendered `prompt`; `new_id` makes the ids of calls.

        Raises ToolError, as `grammar` does.
        """
        name = self._tool_parser(tools)
        parallel, forced = tools is None or tools.parallel, tools is not None and tools.forced
        if self.is_harmony:
            names = None if tools is None or name is None else {tool.name for tool in tools.callable_tools}
            splitter = harmony.HarmonyParser(prompt, names, self.reasoning_parser is not None, new_id)
            return AssistantParser(None, splitter, parallel, only_calls=forced)
        calls = None
        if tools is not None and name is not None:
            schemas = {tool.name: tool.parameters for tool in tools.callable_tools}
            calls = TOOL_PARSERS[name](schemas.keys(), new_id, schemas)
        thoughts = (
            None if self.reasoning_parser is None else ReasoningParser(self._answer_start(prompt), self._thoughts)
        )
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
        Raises ToolError if the model may choose among tools but the parser of calls is turned off.
        """
        name = self._tool_parser(tools)
        if tools is None or name is None:
            return None
        if self.is_harmony:
            return harmony_grammar(prompt, tools, content, self.special_tokens)
        return tool_grammar(tools, name, self._answer_start(prompt), self.special_tokens, content, self._thoughts)

    def after_thinking(self, prompt: str, body: str) -> str | None:
        """Return the Lark grammar of an answer that may or must think before `body`, the right side of a rule.

        None if the answer begins at once, so that `body` is all there is.
        """
        start = self._answer_start(prompt)
        if self.is_harmony and start is not AnswerStart.ANSWER:
            return harmony_grammar(prompt, None, body, self.special_tokens)
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
        if self.is_harmony:
            return AnswerStart.ANSWER if prompt_end(prompt) is PromptEnd.CONTENT else AnswerStart.EITHER
        return AnswerStart.ANSWER if self.reasoning_parser is None else answer_start(self.reasoning_parser, prompt)

    def _tool_parser(self, tools: ToolUse | None) -> str | None:
        if tools is None or tools.choice.mode == "none":
            return None
        if self.tool_parser is None and not tools.forced:
            raise ToolError(
                "tool_choice",
                "is 'auto', but tool_call_parser='none' turns the parser of calls off; set it to 'required', to a "
                "function or to 'none', or start with another tool_call_parser (--tool-call-parser of the server)",
            )
        return self.tool_parser or (harmony.TOOL_PARSER if self.is_harmony else "json_call")


def _are_harmony(tool_parser: str | None, reasoning_parser: str | None, template_source: str) -> bool:
    """Return True if the parsers are those of the harmony format, named or None for the template's.

    Raises ValueError for one parser of the format and one of another.
    """
    given = [name for name in (tool_parser, reasoning_parser) if name not in (None, "none")]
    own = [name for name in given if name in (harmony.TOOL_PARSER, harmony.REASONING_PARSER)]
    if own and own != given:
        raise ValueError(
            f"tool_parser={tool_parser!r} and reasoning_parser={reasoning_parser!r} don't go together: harmony is one "
            f"format for both; give {harmony.TOOL_PARSER!r} and {harmony.REASONING_PARSER!r}, or 'none' for one"
        )
    return bool(own) or (not given and harmony.is_harmony(template_source))


def _check_name(option: str, name: str | None, known: Iterable[str]) -> None:
    allowed = ["none", *sorted(known)]
    if name is not None and name not in allowed:
        raise ValueError(f"{option}={name!r} is not known; give one of {', '.join(allowed)}")
