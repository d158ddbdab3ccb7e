"""A conversation on its way to its answers, whichever API asked: Chat Completions, Responses or Messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.client.observer import TraceContext
from quire.frontend.http.generation import Outputs, check_deadline, grown, last_of
from quire.frontend.http.openai.response_format import RESPONSE_FORMAT, STRUCTURED_OUTPUTS, blamed, only_one
from quire.frontend.http.service import Service
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.text.chat.assistant import AssistantMessage, AssistantParser
from quire.frontend.text.chat.events import Event
from quire.frontend.text.chat.tools import ToolUse
from quire.frontend.text.prompts import truncate
from quire.protocol.messages import SamplingParams, StructuredOutputs


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What an API asks the assistant, in the form of Chat Completions. `template` are options of the chat template.

    `structured_outputs`: what the answer must be, once the model has thought and unless it calls a tool; `format_field`
    is where the client says so. Tools are in the prompt even if `tool_choice` is "none": they stay where the
    conversation's other requests have them, so that its prefix is found in the cache.
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    tools: ToolUse | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    truncate: int | None = None
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None
    trace: TraceContext | None = None
    structured_outputs: StructuredOutputs | None = None
    format_field: str = RESPONSE_FORMAT

    async def begin(self, service: Service) -> Conversation:
        """The conversation, written as a prompt. Raises `ValueError` or `ApiError` for what can't be."""
        service.check_count(1, self.params)
        structured = only_one(self.params.structured_outputs, self.structured_outputs, self.format_field)
        tools = None if self.tools is None else self.tools.for_template()
        prompt = await service.llm.chat_prompt(self.messages, tools=tools, **self.template)
        text, written = prompt.text or "", service.llm.answer_format
        asked_in = STRUCTURED_OUTPUTS if self.structured_outputs is None else self.format_field
        async with blamed(asked_in):
            params = msgspec.structs.replace(self.params, structured_outputs=structured)
            params = written.params(params, text, self.tools)
        return Conversation(
            token_ids=truncate(prompt, self.truncate, service.llm.max_model_len).token_ids,
            params=params,
            new_parser=lambda: written.parser(text, self.tools),
            tools=self.tools,
            format_field=asked_in,
            priority=self.priority,
            cache_salt=self.cache_salt,
            timeout=self.timeout,
            trace=self.trace,
        )


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What the model is asked. `new_parser` makes the reader of one answer; `format_field` constrains what it says."""

    token_ids: list[int]
    params: SamplingParams
    new_parser: Callable[[], AssistantParser]
    tools: ToolUse | None = None
    format_field: str = STRUCTURED_OUTPUTS
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None
    trace: TraceContext | None = None

    def outputs(self, llm: AsyncLLM, kind: Literal["cumulative", "delta"]) -> Outputs:
        """What the engine makes of it."""
        return llm.generate(
            {"prompt_token_ids": self.token_ids},
            self.params,
            output_kind=kind,
            priority=self.priority,
            cache_salt=self.cache_salt,
            timeout=self.timeout,
            trace=self.trace,
        )

    async def answers(self, llm: AsyncLLM) -> tuple[list[Answer], RequestOutput]:
        """All answers, whole."""
        async with blamed(self.format_field, self.tools):
            output = await last_of(self.outputs(llm, "cumulative"))
        return [self._answer(completion) for completion in output.outputs], output

    async def deltas(self, llm: AsyncLLM) -> AsyncGenerator[Delta, None]:
        """What comes of the answers, as it comes."""
        parsers = [self.new_parser() for _ in range(self.params.n)]
        ended: set[int] = set()
        checked = False
        async with blamed(self.format_field, self.tools), aclosing(self.outputs(llm, "delta")) as outputs:
            async for output in outputs:
                if not checked:
                    check_deadline(output)
                    checked = True
                for completion in grown(output, ended):
                    parser = parsers[completion.index]
                    events = parser.feed(completion.text)
                    if completion.finish_reason is not None:
                        events += parser.finish()
                    yield Delta(events, completion, output, parser.finish_reason(completion.finish_reason))

    def _answer(self, completion: CompletionOutput) -> Answer:
        parser = self.new_parser()
        parser.feed(completion.text)
        parser.finish()
        return Answer(completion, parser.message, parser.finish_reason(completion.finish_reason) or "stop")


@dataclass(frozen=True, slots=True)
class Delta:
    """What came of one of the answers: its events, and the tokens they were read from."""

    events: list[Event]
    completion: CompletionOutput
    output: RequestOutput
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole answer, and why it ended: "tool_calls" when it is the client's turn to call."""

    completion: CompletionOutput
    message: AssistantMessage
    finish_reason: str
