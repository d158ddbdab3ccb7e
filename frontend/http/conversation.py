"""A conversation, from its messages to its answers, for the chats of all APIs alike."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import msgspec
from starlette.requests import Request

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.client.observer import TraceContext
from quire.frontend.http.errors import errors_renamed, grammar_errors_at
from quire.frontend.http.generation import Outputs, check_deadline, grown, last_of
from quire.frontend.http.service import ModelService
from quire.frontend.http.shared_fields import RESPONSE_FORMAT, STRUCTURED_OUTPUTS, only_one
from quire.frontend.http.transport.ignored import note_hosted, note_ignored
from quire.frontend.http.usage import TokenTally
from quire.frontend.lora_request import LoRARequest
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.sampling import answer_room, fitted
from quire.frontend.text.chat.answer_format import AnswerFormat
from quire.frontend.text.chat.assistant import AssistantMessage, AssistantParser
from quire.frontend.text.chat.events import Event
from quire.frontend.text.chat.message_keys import KNOWN_KEYS, ignored_keys
from quire.frontend.text.chat.tools import ToolUse, check_tools, hosted_tools
from quire.frontend.text.prompts import LONG_TEXT, Prompt, truncate
from quire.frontend.text.threads import size_of
from quire.frontend.turns import in_turns
from quire.protocol.messages import SamplingParams, StructuredOutputs

Answer = TypeVar("Answer")
StreamEvent = TypeVar("StreamEvent")

_GRAMMAR_COST = 4  # of a character of GBNF, in those of other texts


class Transcript:
    """Builds `messages` of Chat Completions from the pieces of other APIs.

    Consecutive thoughts, texts and calls of the assistant become one message. Several texts of a message are its parts,
    which chat templates take as they do those of Chat Completions.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._calls: set[str] = set()  # by id

    def say(self, role: str, texts: list[str], merge: bool = False) -> None:
        """Add texts of `role`. `merge`: append them to the role's last message, as always happens for the assistant."""
        if not (self._is_last(role) and (merge or role == "assistant")):
            self.messages.append({"role": role, "content": ""})
        _add_texts(self.messages[-1], texts)

    def think(self, text: str) -> None:
        """Add thoughts of the assistant to the message under construction."""
        message = self._assistant()
        before = message.get("reasoning_content")
        message["reasoning_content"] = f"{before}\n{text}" if before else text

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        """Add a tool call of the assistant; `arguments` is an object, or the JSON text of one."""
        function = {"name": name, "arguments": arguments}
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})
        self._calls.add(call_id)

    def knows_call(self, call_id: str) -> bool:
        """Return whether the assistant made this call."""
        return call_id in self._calls

    def result(self, call_id: str, texts: list[str]) -> None:
        """Add the result of a call."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": ""})
        _add_texts(self.messages[-1], texts)

    def _is_last(self, role: str) -> bool:
        return bool(self.messages) and self.messages[-1]["role"] == role

    def _assistant(self) -> dict[str, Any]:
        """Return the assistant's message under construction, which is the last one."""
        if not self._is_last("assistant"):
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _add_texts(message: dict[str, Any], texts: Iterable[str]) -> None:
    """Add texts that are not empty to the content of a message: a text, or a list of text parts if it has several."""
    for text in filter(None, texts):
        content = message["content"]
        if not content:
            message["content"] = text
            continue
        if isinstance(content, str):
            content = message["content"] = [_text_part(content)]
        content.append(_text_part(text))


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A request to the assistant in the form of Chat Completions, whichever API it came by.

    `template`: options of the chat template. `structured_outputs`: the constraint on the answer, which applies after
    the thoughts and unless the model calls a tool; `format_field`: the field in which the client gave it. Tools are in
    the prompt even if `tool_choice` is "none": the conversation's other requests have them in the same place, so its
    prefix is found in the cache. `prediction`: what the answer will probably say.
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    tools: ToolUse | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    truncate: int | None = None
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None
    tenant: str = ""
    session: str | None = None
    lora_request: LoRARequest | None = None
    trace: TraceContext | None = None
    structured_outputs: StructuredOutputs | None = None
    format_field: str = RESPONSE_FORMAT
    prediction: str = ""

    async def prompt(self, service: ModelService, answer_format: AnswerFormat | None = None) -> Prompt:
        """Render the messages; `answer_format`: that of the template, if it is known already. Raises `ValueError`."""
        tools = None if self.tools is None else self.tools.for_template()
        return await service.llm.chat_prompt(self.messages, tools=tools, answer_format=answer_format, **self.template)

    async def begin(self, service: ModelService) -> Conversation:
        """Return the conversation with its prompt rendered. Raises `ValueError` or `ApiError` if it is invalid."""
        service.check_count(1, self.params)
        structured = only_one(self.params.structured_outputs, self.structured_outputs, self.format_field)
        template: str | None = self.template.get("chat_template")
        detect = functools.partial(service.llm.answer_format_of, template)
        answer_format = await service.llm.run_python(detect, len(template or ""))
        prompt = await self.prompt(service, answer_format)
        text = prompt.text or ""
        constraint_field = STRUCTURED_OUTPUTS if self.structured_outputs is None else self.format_field
        async with grammar_errors_at(constraint_field):
            params = msgspec.structs.replace(self.params, structured_outputs=structured)
            constrain = functools.partial(answer_format.params, params, text, self.tools)
            tools = None if self.tools is None else self.tools.for_template()
            size = size_of((_converted(structured), tools), LONG_TEXT + 1)
            params = await service.llm.run_python(constrain, size)
        max_model_len = service.llm.max_model_len
        return Conversation(
            token_ids=truncate(prompt, self.truncate, max_model_len, answer_room(params, max_model_len)).token_ids,
            params=params,
            new_parser=lambda: answer_format.parser(text, self.tools),
            tools=self.tools,
            format_field=constraint_field,
            priority=self.priority,
            cache_salt=self.cache_salt,
            timeout=self.timeout,
            tenant=self.tenant,
            session=self.session,
            lora_request=self.lora_request,
            trace=self.trace,
            prediction=self.prediction,
        )


def _converted(structured: StructuredOutputs | None) -> list[str | dict[str, Any] | None]:
    """Return what is converted to constrain an answer; a grammar several times, since it takes as long."""
    if structured is None:
        return []
    return [structured.json, structured.regex, *[structured.grammar] * _GRAMMAR_COST]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A prompt and how to read its answers.

    `new_parser` makes the parser of one answer; `format_field` is the field to name if the engine rejects the grammar.
    """

    token_ids: list[int]
    params: SamplingParams
    new_parser: Callable[[], AssistantParser]
    tools: ToolUse | None = None
    format_field: str = STRUCTURED_OUTPUTS
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None
    tenant: str = ""
    session: str | None = None
    lora_request: LoRARequest | None = None
    trace: TraceContext | None = None
    prediction: str = ""

    def outputs(self, llm: AsyncLLM, kind: Literal["final_only", "delta"]) -> Outputs:
        """Return the engine's outputs."""
        return llm.generate(
            {"prompt_token_ids": self.token_ids, "prediction": self.prediction},
            self.params,
            output_kind=kind,
            priority=self.priority,
            cache_salt=self.cache_salt,
            timeout=self.timeout,
            tenant=self.tenant,
            session=self.session,
            lora_request=self.lora_request,
            trace=self.trace,
        )

    def fitted(self, max_model_len: int) -> Conversation:
        """Return it without a token limit beyond the context, which clients of large models always send."""
        return dataclasses.replace(self, params=fitted(self.params, len(self.token_ids), max_model_len))

    async def answers(self, llm: AsyncLLM) -> tuple[list[AssistantAnswer], RequestOutput]:
        """Return all answers, complete."""
        async with grammar_errors_at(self.format_field, self.tools):
            output = await last_of(self.outputs(llm, "final_only"))
        return [self._answer(completion) async for completion in in_turns(output.outputs)], output

    async def deltas(self, llm: AsyncLLM) -> AsyncGenerator[AnswerDelta, None]:
        """Yield the increments of all answers as they arrive."""
        parsers = [self.new_parser() for _ in range(self.params.n)]
        ended: set[int] = set()
        deadline_checked = False
        async with grammar_errors_at(self.format_field, self.tools), aclosing(self.outputs(llm, "delta")) as outputs:
            async for output in outputs:
                if not deadline_checked:
                    check_deadline(output)
                    deadline_checked = True
                async for completion in in_turns(grown(output, ended)):
                    parser = parsers[completion.index]
                    events = parser.feed(completion.text)
                    if completion.finish_reason is not None:
                        events += parser.finish()
                    end = (completion.finish_reason, completion.stop_reason)
                    yield AnswerDelta(events, completion, output, parser.finish_reason(*end), parser.cuts_call(*end))

    def _answer(self, completion: CompletionOutput) -> AssistantAnswer:
        parser = self.new_parser()
        parser.feed(completion.text)
        parser.finish()
        end = (completion.finish_reason, completion.stop_reason)
        return AssistantAnswer(completion, parser.message, parser.finish_reason(*end) or "stop", parser.cuts_call(*end))


class EventWriter(ABC, Generic[Answer, StreamEvent]):
    """Writes the answer of a conversation as events, or as the whole `answer` that these events build.

    `field_names`: names of fields in errors, with their names in this API.
    """

    def __init__(
        self, service: ModelService, conversation: Conversation, answer: Answer, field_names: Mapping[str, str]
    ) -> None:
        self._service = service
        self._conversation = conversation
        self._answer = answer
        self._field_names = field_names
        self._tally = TokenTally()
        self._begun = False

    async def whole(self) -> Answer:
        """Return the complete answer."""
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        return self._answer

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events."""
        async with aclosing(self._events()) as events:
            async for each in events:
                yield self._encoded(each)

    async def _events(self) -> AsyncGenerator[StreamEvent, None]:
        """Yield the events; encode each before taking the next, since their contents keep growing."""
        with errors_renamed(self._field_names):
            async with aclosing(self._conversation.deltas(self._service.llm)) as deltas:
                async for delta in deltas:
                    for each in self._take(delta):
                        yield each

    @abstractmethod
    def _encoded(self, each: StreamEvent) -> bytes:
        """Return an event as the API's stream has it."""

    @abstractmethod
    def _take(self, delta: AnswerDelta) -> Iterator[StreamEvent]:
        """Yield the events of a delta, and update the answer."""


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """An increment of one answer: its events, and the tokens that they were parsed from.

    `cuts_call`: the answer ends here, within a tool call.
    """

    events: list[Event]
    completion: CompletionOutput
    output: RequestOutput
    finish_reason: str | None
    cuts_call: bool = False


@dataclass(frozen=True, slots=True)
class AssistantAnswer:
    """One complete answer and its finish reason: "tool_calls" if the client is to make the calls.

    `cuts_call`: it ends within a tool call, for which the reason is never "tool_calls".
    """

    completion: CompletionOutput
    message: AssistantMessage
    finish_reason: str
    cuts_call: bool = False


def tools_of_chat(
    request: Request,
    messages: Sequence[Any],
    tools: Any,
    choice: str | Mapping[str, Any] | None = None,
    parallel: bool | None = None,
    *,
    known_keys: frozenset[str] = KNOWN_KEYS,
) -> ToolUse | None:
    """Return the tools of a chat in OpenAI's form, and note what of it is ignored. Raises `ToolError`.

    `known_keys`: those that messages may have.
    """
    note_ignored(request, ignored_keys(messages, known_keys), "messages[].")
    note_hosted(request, hosted_tools(tools))
    if isinstance(choice, Mapping) and isinstance(allowed := choice.get("allowed_tools"), Mapping):
        note_hosted(request, hosted_tools(allowed.get("tools")), "tool_choice.allowed_tools.tools")
    return check_tools(tools, choice, parallel, skip_hosted=True)


INVALID_JSON = "INVALID_JSON"


def arguments_object(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object; if they are invalid or cut off, as an object that holds their text."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {INVALID_JSON: text}
