"""What `LLM` and `AsyncLLM` have in common: they tell what the answer to a conversation says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.frontend.client.engine import Engine
from quire.frontend.outputs import RequestOutput
from quire.frontend.text.chat.answer_format import AnswerFormat
from quire.frontend.text.chat.assistant import AssistantMessage, parse_answer
from quire.frontend.text.chat.tools import check_tools


class AnswerReader:
    """Reads what `chat` has made."""

    _engine: Engine

    def parse(
        self,
        output: RequestOutput,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
    ) -> list[AssistantMessage]:
        """The message that each completion of a `chat` is, with its thoughts and tool calls.

        `output` is the last or a cumulative one; `tools` and what follows are once more the arguments of `chat`.
        Raises `ToolError` (a `ValueError`).
        """
        use = check_tools(tools, tool_choice, parallel_tool_calls)
        prompt = output.prompt or ""
        return [parse_answer(completion.text, self.answer_format.parser(prompt, use)) for completion in output.outputs]

    @property
    def answer_format(self) -> AnswerFormat:
        """How the model writes thoughts and tool calls; its `parser` reads an answer as it arrives."""
        return self._engine.answer_format
