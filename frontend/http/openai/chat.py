"""`POST /v1/chat/completions`: answer conversations."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.client.observer import TraceContext
from quire.frontend.http.conversation import AnswerDelta, AssistantAnswer, Conversation, Turn, tools_of_chat
from quire.frontend.http.errors import bad_request, errors_renamed
from quire.frontend.http.openai.answer_route import AnswerRoute, route_of_answer
from quire.frontend.http.openai.fields import (
    REFUSED,
    GenerationFields,
    ResponseFormat,
    StreamOptions,
    check_top_logprobs,
    known_end,
    sampling_params,
    wanted_format,
)
from quire.frontend.http.openai.logprobs import ChatLogprobs, TokenWriter, prompt_logprobs
from quire.frontend.http.service import Endpoints, ModelService
from quire.frontend.http.shared_fields import (
    CHOICE,
    EFFORT,
    MESSAGE,
    NAMED_TOOL,
    TOOL,
    VERBOSITY,
    effort_kwargs,
    ignored_verbosity,
)
from quire.frontend.http.transport.bodies import ITEMS, NOT_EMPTY, Refusals
from quire.frontend.http.transport.ignored import note_ignored
from quire.frontend.http.transport.responses import encoded, new_id
from quire.frontend.http.transport.sse import DONE, event
from quire.frontend.http.usage import CompletionUsage, Thoughts, TokenTally
from quire.frontend.outputs import RequestOutput
from quire.frontend.text.chat.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStart
from quire.frontend.turns import free, in_turns
from quire.protocol.engine_options import CONTENT_FORMATS


class PredictionPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of the predicted text."""

    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """Text that much of the answer will probably repeat, so that it comes sooner. It changes no token."""

    type: Literal["content"]
    content: str | Annotated[list[PredictionPart], ITEMS]

    @property
    def text(self) -> str:
        """The predicted text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


_CHAT_FIELDS = ("chat_template_content_format", "prediction", "verbosity")  # refused by other endpoints
_FORMAT = Meta(extra_json_schema={"enum": list(CONTENT_FORMATS)})


class ChatBody(GenerationFields, kw_only=True):
    """The body of a chat, with OpenAI's and vLLM's fields."""

    refused: ClassVar[Refusals] = {
        **{name: refusal for name, refusal in REFUSED.items() if name not in _CHAT_FIELDS},
        "echo": ((False,), "the answer is only the assistant's text; continue_final_message continues a message"),
    }

    messages: Annotated[list[Annotated[dict[str, Any], MESSAGE]], NOT_EMPTY, ITEMS]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Annotated[dict[str, Any], TOOL]], ITEMS] | None = None
    tool_choice: Annotated[str, CHOICE] | Annotated[dict[str, Any], NAMED_TOOL] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Annotated[str, EFFORT] | None = None
    verbosity: Annotated[str, VERBOSITY] | None = None
    include_reasoning: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template_content_format: Annotated[str, _FORMAT] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    prediction: Prediction | None = None

    @property
    def field_names(self) -> dict[str, str]:
        """Names of fields in errors, with their names in this body."""
        return {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}


class CalledFunction(msgspec.Struct, omit_defaults=True):
    """The function of a tool call, or a piece of it in a delta."""

    arguments: str
    name: str | None = None


class ToolCallPart(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A tool call; only deltas have `index`."""

    function: CalledFunction
    index: int | msgspec.UnsetType = msgspec.UNSET
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """The assistant's message."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallPart] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A piece of the assistant's message."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPart] | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    route: AnswerRoute | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    route: AnswerRoute | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The complete answers to a conversation."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_logprobs: list[Any] | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed chat."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatEndpoint(Endpoints):
    """Handler of the endpoint."""

    async def create(self, request: Request) -> Response:
        """Answer a conversation with a `ChatCompletion`, or with a stream of `ChatChunk`s."""
        service = self._service
        body = await service.read(request, ChatBody)
        answer_id = new_id("chatcmpl", given=body.request_id)
        turn = await service.convert(request, lambda: self._turn(body, request, answer_id))
        conversation = await turn.begin(service)
        writer = ChatWriter(service, body, conversation, answer_id)
        return await service.respond(request, writer.whole, writer.chunks() if body.stream else None)

    def _turn(self, body: ChatBody, request: Request, answer_id: str) -> Turn:
        service = self._service
        note_ignored(request, ignored_verbosity(body.verbosity, "verbosity"))
        service.check_template(body.chat_template)
        effort = effort_kwargs(body.reasoning_effort, "reasoning_effort")
        kwargs = {**effort, **(body.chat_template_kwargs or {})}
        if body.documents is not None:
            kwargs.setdefault("documents", body.documents)
        continues = bool(body.continue_final_message)
        return Turn(
            messages=body.messages,
            params=sampling_params(body, service.defaults, _max_tokens(body), _num_logprobs(body)),
            tools=tools_of_chat(request, body.messages, body.tools, body.tool_choice, body.parallel_tool_calls),
            template={
                "chat_template": body.chat_template,
                "chat_template_content_format": body.chat_template_content_format,
                "add_generation_prompt": body.add_generation_prompt is not False and not continues,
                "continue_final_message": continues,
                "chat_template_kwargs": kwargs,
                "add_special_tokens": bool(body.add_special_tokens),
            },
            truncate=body.truncate_prompt_tokens,
            priority=body.priority or 0,
            **service.terms(request, body.cache_salt, body.session),
            trace=TraceContext("chat", request.headers, answer_id),
            structured_outputs=wanted_format(body.response_format),
            prediction="" if body.prediction is None else body.prediction.text,
        )


class ChatWriter:
    """Writes the answers of a conversation in OpenAI's shape.

    The finish reason is "tool_calls" if the model chose to call a tool or had to call any; it is "stop" if it had to
    call the function that `tool_choice` names. OpenAI and vLLM do the same, and clients rely on it. A call that a stop
    string cut off has the other one of the two: "stop", or "length" if the function was named.
    """

    def __init__(self, service: ModelService, body: ChatBody, conversation: Conversation, answer_id: str) -> None:
        self._service = service
        self._body = body
        self._conversation = conversation
        self._id = answer_id
        self._created = service.now()
        self._tokens = TokenWriter(service.tokenizer, bool(body.return_tokens_as_token_ids))
        self._shows_reasoning = body.include_reasoning is not False

    async def whole(self) -> ChatCompletion:
        """Return the complete answers."""
        with errors_renamed(self._body.field_names):
            answers, output = await self._conversation.answers(self._service.llm)
        thoughts = Thoughts()
        for answer in answers:
            if answer.message.reasoning_content is not None:
                thoughts.add(answer.completion.index, answer.message.reasoning_content)
        choices = []
        async for answer in in_turns(answers):
            choices.append(encoded(await self._choice(output, answer)))
            await free(answer.completion.logprobs)
        result = ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._service.name,
            choices=choices,
            usage=self._usage(output, thoughts),
        )
        if self._body.prompt_logprobs is not None:
            result.prompt_logprobs = await prompt_logprobs(output.prompt_logprobs)
            await free(output.prompt_logprobs)
        if self._body.return_token_ids:
            result.prompt_token_ids = output.prompt_token_ids
        return result

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the answers as encoded events."""
        shown = self._body.stream_options or StreamOptions()
        usage = None if shown.include_usage else msgspec.UNSET
        chunk = ChatChunk(id=self._id, created=self._created, model=self._service.name, choices=[], usage=usage)
        encode = msgspec.json.Encoder().encode
        tally, thoughts, begun = TokenTally(), Thoughts(), set[int]()
        with errors_renamed(self._body.field_names):
            async with aclosing(self._conversation.deltas(self._service.llm)) as deltas:
                async for delta in deltas:
                    index = delta.completion.index
                    tally.add_delta(delta.output, delta.completion)
                    thoughts.add_events(index, delta.events)
                    if shown.continuous_usage_stats:
                        chunk.usage = tally.usage
                    if index not in begun:
                        begun.add(index)
                        chunk.choices = [ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))]
                        if self._body.return_token_ids:
                            chunk.prompt_token_ids = delta.output.prompt_token_ids
                        yield event(encode(chunk))
                        chunk.prompt_token_ids = msgspec.UNSET
                    for choice in await self._chunk_choices(delta):
                        chunk.choices = [choice]
                        yield event(encode(chunk))
        if shown.include_usage:
            chunk.choices, chunk.usage = [], self._with_details(tally, thoughts)
            yield event(encode(chunk))
        yield DONE

    def _usage(self, output: RequestOutput, thoughts: Thoughts) -> CompletionUsage:
        tally = TokenTally()
        tally.add(0, output)
        return self._with_details(tally, thoughts)

    def _with_details(self, tally: TokenTally, thoughts: Thoughts) -> CompletionUsage:
        usage = thoughts.added_to(tally.usage, self._service.tokenizer)
        return usage if self._body.prediction is None else tally.add_predictions_to(usage)

    async def _choice(self, output: RequestOutput, answer: AssistantAnswer) -> ChatChoice:
        completion = answer.completion
        parsed = answer.message
        message = ChatMessage(content=parsed.content)
        if parsed.reasoning_content is not None and self._shows_reasoning:
            message.reasoning_content = parsed.reasoning_content
        if parsed.tool_calls:
            message.tool_calls = [
                ToolCallPart(id=call.id, type="function", function=CalledFunction(call.arguments, call.name))
                for call in parsed.tool_calls
            ]
        choice = ChatChoice(
            index=completion.index,
            message=message,
            finish_reason=self._finish_reason(answer.finish_reason, answer.cuts_call),
            stop_reason=known_end(completion)[1],
        )
        if completion.logprobs is not None and self._body.logprobs:
            top = self._body.top_logprobs or 0
            choice.logprobs = await self._tokens.chat(completion.logprobs, completion.token_ids, top)
        if self._body.return_token_ids:
            choice.token_ids = completion.token_ids
        if self._body.return_route:
            choice.route = route_of_answer(self._service.llm, output.metrics)
        return choice

    async def _chunk_choices(self, delta: AnswerDelta) -> list[ChatChunkChoice]:
        """Return a choice for each event; log probabilities, token ids and the finish reason go into the last."""
        completion, body = delta.completion, self._body
        index = completion.index
        parts = [part for part in map(self._part, delta.events) if part is not None]
        choices = [ChatChunkChoice(index=index, delta=part) for part in parts]
        shows_tokens = bool(body.logprobs or body.return_token_ids)
        if not choices and (delta.finish_reason is not None or (shows_tokens and completion.token_ids)):
            choices = [ChatChunkChoice(index=index, delta=ChatDelta())]
        if not choices:
            return []
        last = choices[-1]
        if completion.logprobs and body.logprobs:
            last.logprobs = await self._tokens.chat(completion.logprobs, completion.token_ids, body.top_logprobs or 0)
        if body.return_token_ids:
            last.token_ids = completion.token_ids
        if delta.finish_reason is not None:
            last.finish_reason = self._finish_reason(delta.finish_reason, delta.cuts_call)
            last.stop_reason = known_end(completion)[1]
            if body.return_route:
                last.route = route_of_answer(self._service.llm, delta.output.metrics)
        return choices

    def _finish_reason(self, reason: str, cuts_call: bool) -> str:
        tools = self._conversation.tools
        if reason == "timeout":
            return "length"
        if tools is None or not tools.choice.named:
            return reason
        if cuts_call:
            return "length"
        return "stop" if reason == "tool_calls" else reason

    def _part(self, event: Event) -> ChatDelta | None:
        match event:
            case ContentDelta(text):
                return ChatDelta(content=text)
            case ReasoningDelta(text):
                return ChatDelta(reasoning_content=text) if self._shows_reasoning else None
            case ToolCallStart(index, call_id, name):
                call = ToolCallPart(index=index, id=call_id, type="function", function=CalledFunction("", name))
            case ToolCallArguments(index, text):
                call = ToolCallPart(index=index, function=CalledFunction(text))
        return ChatDelta(tool_calls=[call])


def _max_tokens(body: ChatBody) -> int | None:
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise bad_request(
            f"max_tokens={body.max_tokens} and max_completion_tokens={body.max_completion_tokens} are the same limit, "
            "but differ; give only one",
            "max_completion_tokens",
        )
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _num_logprobs(body: ChatBody) -> int | None:
    check_top_logprobs(body.top_logprobs)
    if body.top_logprobs is not None and not body.logprobs:
        if body.top_logprobs == 0:
            return None
        raise bad_request(
            "top_logprobs has an effect only with logprobs=true; set it, or leave top_logprobs out", "top_logprobs"
        )
    return (body.top_logprobs or 0) if body.logprobs else None
