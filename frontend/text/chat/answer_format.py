"""How a model writes thoughts and tool calls, and what follows from it for a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from quire.frontend.structured_outputs import MAX_CHARACTERS
from quire.frontend.text.chat.answer_rule import answer_rule
from quire.frontend.text.chat.assistant import AssistantParser
from quire.frontend.text.chat.reasoning import (
    CLOSE,
    OPEN,
    REASONING_PARSERS,
    Beginning,
    ReasoningParser,
    beginning,
    detect_reasoning,
)
from quire.frontend.text.chat.thinking_grammar import after_thinking
from quire.frontend.text.chat.tool_grammar import tool_grammar
from quire.frontend.text.chat.tool_parsers import TOOL_PARSERS, detect_parser
from quire.frontend.text.chat.tool_parsers.base import new_call_id
from quire.frontend.text.chat.tools import ToolError, ToolUse
from quire.protocol.messages import SamplingParams, StructuredOutputs


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The parsers of a model's answers by name, None where it has none; `special_tokens` are the tokenizer's."""

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
        """The format that a chat template shows, or the parsers that are named; "none" is for none.

        Raises ValueError for a name that is not known.
        """
        _check_name("tool_parser", tool_parser, TOOL_PARSERS)
        _check_name("reasoning_parser", reasoning_parser, REASONING_PARSERS)
        tools = detect_parser(template_source) if tool_parser is None else tool_parser
        reasoning = detect_reasoning(template_source, added_tokens) if reasoning_parser is None else reasoning_parser
        return cls(
            None if tools == "none" else tools,
            None if reasoning == "none" else reasoning,
            frozenset(special_tokens),
        )

    @property
    def reads_special_tokens(self) -> bool:
        """Whether marks are special tokens, so that answers must be decoded with `skip_special_tokens=False`.

        A bare format does without its mark.
        """
        parser = None if self.tool_parser is None else TOOL_PARSERS[self.tool_parser]
        marks = set() if parser is None or parser.bare else {parser.tag, parser.closing}
        if self.reasoning_parser is not None:
            marks |= {OPEN, CLOSE}
        return not marks.isdisjoint(self.special_tokens)

    def parser(
        self, prompt: str, tools: ToolUse | None = None, new_id: Callable[[], str] = new_call_id
    ) -> AssistantParser:
        """A parser of one answer to the rendered `prompt`; `new_id` names the calls.

        Raises ToolError, as `grammar` does.
        """
        name = self._tool_parser(tools)
        calls = None
        if tools is not None and name is not None:
            calls = TOOL_PARSERS[name]({tool.name for tool in tools.callable_tools}, new_id)
        thoughts = None if self.reasoning_parser is None else ReasoningParser(self._beginning(prompt))
        parallel, forced = tools is None or tools.parallel, tools is not None and tools.forced
        return AssistantParser(calls, thoughts, parallel, only_calls=forced)

    def params(self, params: SamplingParams, prompt: str, tools: ToolUse | None = None) -> SamplingParams:
        """`params`, which have been checked, of an answer to the rendered `prompt` that a parser is to read.

        They keep the marks in the text, and constrain it for the sake of the tools. What `structured_outputs` asks for
        is asked of what the model says: it may think before, and call a tool instead; when it must call one, there are
        no words to ask it of. Raises ToolError, as `grammar` does.
        """
        return msgspec.structs.replace(
            params,
            skip_special_tokens=params.skip_special_tokens and not self.reads_special_tokens,
            structured_outputs=self._constraint(params.structured_outputs, prompt, tools),
        )

    def grammar(self, prompt: str, tools: ToolUse | None, words: str | None = None) -> str | None:
        """The Lark grammar that the answer must follow for the sake of its tools, if any.

        `words`, the right side of a rule, is what it must be if it calls none.
        Raises ToolError if the model is to choose among tools whose calls it has no known format for.
        """
        name = self._tool_parser(tools)
        if tools is None or name is None:
            return None
        return tool_grammar(tools, name, self._beginning(prompt), self.special_tokens, words)

    def after_thinking(self, prompt: str, body: str) -> str | None:
        """The Lark grammar of an answer that follows `body`, the right side of a rule, but may or must think first.

        None if it begins at once, so that `body` is all there is.
        """
        begins = self._beginning(prompt)
        return None if begins is Beginning.ANSWER else after_thinking(body, begins, self.special_tokens)

    def _constraint(
        self, structured: StructuredOutputs | None, prompt: str, tools: ToolUse | None
    ) -> StructuredOutputs | None:
        """The same with thoughts and calls; None if every answer is allowed."""
        if structured is None:
            grammar = self.grammar(prompt, tools)
        elif tools is not None and tools.callable_tools:
            grammar = self.grammar(prompt, tools, answer_rule(structured))
        elif self._beginning(prompt) is Beginning.ANSWER:
            return structured
        else:
            grammar = self.after_thinking(prompt, answer_rule(structured))
        if tools is not None and grammar is not None and len(grammar) > MAX_CHARACTERS:
            raise ToolError(
                "tools",
                f"need a grammar of {len(grammar)} characters for their calls; it may have {MAX_CHARACTERS}, "
                "so give fewer tools, or shorter schemas",
            )
        return None if grammar is None else StructuredOutputs(grammar=grammar)

    def _beginning(self, prompt: str) -> Beginning:
        return Beginning.ANSWER if self.reasoning_parser is None else beginning(self.reasoning_parser, prompt)

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
