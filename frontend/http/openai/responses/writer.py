"""Writer of a conversation's answer as a response, complete or as events, and its items under construction."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from quire.frontend.http.conversation import AnswerDelta, Conversation, EventWriter
from quire.frontend.http.errors import ApiError
from quire.frontend.http.openai.logprobs import TokenLogprob, TokenWriter
from quire.frontend.http.openai.responses import response as wire
from quire.frontend.http.openai.responses.body import ResponsesBody
from quire.frontend.http.openai.responses.history import Keeper
from quire.frontend.http.service import ModelService
from quire.frontend.http.transport.responses import new_id
from quire.frontend.http.transport.sse import event
from quire.frontend.http.usage import Thoughts
from quire.frontend.text.chat.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStart


class OpenMessage:
    """Builds a message with one text."""

    def __init__(self, index: int) -> None:
        self.item = wire.OutputMessage(id=new_id("msg", "_"))
        self._at = (self.item.id, index)
        self._index = index
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def opened(self) -> list[wire.ResponseStreamEvent]:
        """Begin the message."""
        return [
            wire.ItemAdded(output_index=self._index, item=self.item),
            wire.PartAdded(*self._at, part=wire.OutputText()),
        ]

    def grow(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> wire.ResponseStreamEvent:
        """Add a piece of text."""
        self._text.append(text)
        self._logprobs += logprobs
        return wire.OutputTextDelta(*self._at, delta=text, logprobs=list(logprobs))

    def close(self, status: str, logprobs: Sequence[TokenLogprob] = ()) -> list[wire.ResponseStreamEvent]:
        """End the message; `logprobs` are those of tokens after the text."""
        text = "".join(self._text)
        self._logprobs += logprobs
        part = wire.OutputText(text, logprobs=self._logprobs)
        self.item.content, self.item.status = [part], status
        return [
            wire.OutputTextDone(*self._at, text=text, logprobs=self._logprobs),
            wire.PartDone(*self._at, part=part),
            wire.ItemDone(output_index=self._index, item=self.item),
        ]


class OpenReasoning:
    """Builds an item of thoughts."""

    def __init__(self, index: int) -> None:
        self.item = wire.Reasoning(id=new_id("rs", "_"))
        self._at = (self.item.id, index)
        self._index = index
        self._text: list[str] = []

    def opened(self) -> list[wire.ResponseStreamEvent]:
        """Begin the item."""
        return [
            wire.ItemAdded(output_index=self._index, item=self.item),
            wire.PartAdded(*self._at, part=wire.ReasoningText()),
        ]

    def grow(self, text: str) -> wire.ResponseStreamEvent:
        """Add a piece of thoughts."""
        self._text.append(text)
        return wire.ReasoningTextDelta(*self._at, delta=text)

    def close(self, status: str) -> list[wire.ResponseStreamEvent]:
        """End the item."""
        part = wire.ReasoningText("".join(self._text))
        self.item.content, self.item.status = [part], status
        return [
            wire.ReasoningTextDone(*self._at, text=part.text),
            wire.PartDone(*self._at, part=part),
            wire.ItemDone(output_index=self._index, item=self.item),
        ]


class OpenCall:
    """Builds a function call."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self.item = wire.FunctionCall(id=new_id("fc", "_"), call_id=call_id, name=name)
        self._at = (self.item.id, index)
        self._index = index
        self._arguments: list[str] = []

    def opened(self) -> list[wire.ResponseStreamEvent]:
        """Begin the call."""
        return [wire.ItemAdded(output_index=self._index, item=self.item)]

    def grow(self, text: str) -> wire.ResponseStreamEvent:
        """Add a piece of the arguments."""
        self._arguments.append(text)
        return wire.ArgumentsDelta(*self._at, delta=text)

    def close(self, status: str) -> list[wire.ResponseStreamEvent]:
        """End the call."""
        self.item.arguments, self.item.status = "".join(self._arguments), status
        return [
            wire.ArgumentsDone(*self._at, name=self.item.name, arguments=self.item.arguments),
            wire.ItemDone(output_index=self._index, item=self.item),
        ]


OpenItem = OpenMessage | OpenReasoning | OpenCall


class ResponseOutput:
    """Builds the items of a response from the events of its answer.

    `items` are in the order in which they began; the contents of the last one are empty until it has ended.
    """

    def __init__(self) -> None:
        self.items: list[wire.Item] = []
        self._open: OpenItem | None = None
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text is still undecided

    def take(self, events: list[Event], logprobs: list[TokenLogprob]) -> Iterator[wire.ResponseStreamEvent]:
        """Add events of the answer; `logprobs` are those of the tokens from which they were parsed.

        They are attached to the text of these tokens; thoughts and calls have no field for theirs.
        """
        self._logprobs += logprobs
        texts = [each for each in events if isinstance(each, ContentDelta)]
        if events and not texts:
            self._logprobs = []
        for each in events:
            match each:
                case ContentDelta(text):
                    if not isinstance(self._open, OpenMessage):
                        yield from self._begin(OpenMessage(len(self.items)))
                    assert isinstance(self._open, OpenMessage)
                    yield self._open.grow(text, self._take_logprobs() if each is texts[-1] else ())
                case ReasoningDelta(text):
                    if not isinstance(self._open, OpenReasoning):
                        yield from self._begin(OpenReasoning(len(self.items)))
                    assert isinstance(self._open, OpenReasoning)
                    yield self._open.grow(text)
                case ToolCallStart(_, call_id, name):
                    yield from self._begin(OpenCall(len(self.items), call_id, name))
                case ToolCallArguments(_, text):
                    assert isinstance(self._open, OpenCall)  # a call begins before its arguments
                    yield self._open.grow(text)

    def end(self, status: str) -> Iterator[wire.ResponseStreamEvent]:
        """End the last item; an answer without text gets an empty message."""
        if not self.items:
            yield from self._begin(OpenMessage(0))
        yield from self._close(status)

    def _begin(self, item: OpenItem) -> Iterator[wire.ResponseStreamEvent]:
        yield from self._close("completed")
        self._open = item
        self.items.append(item.item)
        yield from item.opened()

    def _close(self, status: str) -> Iterator[wire.ResponseStreamEvent]:
        match self._open:
            case None:
                return
            case OpenMessage() as message:
                yield from message.close(status, self._take_logprobs())
            case item:
                yield from item.close(status)
        self._open = None

    def _take_logprobs(self) -> list[TokenLogprob]:
        taken, self._logprobs = self._logprobs, []
        return taken


# Finish reason -> status of the response, status of its last item, and the one of OpenAI's reasons why it is incomplete
# that clients take for an answer that may be continued.
_ENDS = {
    "length": ("incomplete", "incomplete", "max_output_tokens"),
    "timeout": ("incomplete", "incomplete", "max_output_tokens"),
}


class ResponseWriter(EventWriter[wire.Response, wire.ResponseStreamEvent]):
    """Writes one response."""

    def __init__(
        self,
        service: ModelService,
        body: ResponsesBody,
        conversation: Conversation,
        answer_id: str,
        keeper: Keeper | None = None,
    ) -> None:
        answer = _response(service, body, conversation, answer_id, is_stored=keeper is not None)
        super().__init__(service, conversation, answer, body.field_names)
        self._body = body
        self._tokens = TokenWriter(service.tokenizer, bool(body.return_tokens_as_token_ids))
        self._output = ResponseOutput()
        self._thoughts = Thoughts()
        self._answer.output = self._output.items
        self._numbers = itertools.count()
        self._keeper = keeper

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events. A response that is cut off is stored as far as it came."""
        async with aclosing(super().stream()) as events:
            try:
                async for each in events:
                    yield each
            except (GeneratorExit, asyncio.CancelledError):
                if self._begun and self._answer.status == "in_progress":
                    self._end_early("cancelled")
                raise

    async def _events(self) -> AsyncGenerator[wire.ResponseStreamEvent, None]:
        async with aclosing(super()._events()) as events:
            async for each in events:
                if isinstance(each, (wire.Completed, wire.Incomplete)) and self._keeper is not None:
                    # Before the client has the event, so that its next request finds the response.
                    self._answer.store = await self._keeper.keep(self._answer)
                yield each

    def _end_early(self, status: str) -> None:
        """End a response that has not ended by itself, and store it."""
        if self._output.items:
            for _ in self._output.end("incomplete"):
                pass
        self._answer.status = status
        if self._keeper is not None:
            self._keeper.keep_later(self._answer)

    def explain(self, error: Exception) -> bytes:
        """Return the last events of a failed stream."""
        api_error = self._service.api_error(error)
        self._answer.error = wire.ResponseError(_error_code(api_error), api_error.message)
        self._end_early("failed")
        event_of_error = wire.Error(code=api_error.code, message=api_error.message, param=api_error.param)
        return self._encoded(event_of_error) + self._encoded(wire.Failed(response=self._answer))

    def _encoded(self, each: wire.ResponseStreamEvent) -> bytes:
        each.sequence_number = next(self._numbers)
        return event(msgspec.json.encode(each), each.name)

    def _take(self, delta: AnswerDelta) -> Iterator[wire.ResponseStreamEvent]:
        if not self._begun:
            self._begun = True
            yield wire.Created(response=self._answer)
            yield wire.InProgress(response=self._answer)
        self._tally.add_delta(delta.output, delta.completion)
        self._thoughts.add_events(delta.completion.index, delta.events)
        yield from self._output.take(delta.events, self._logprobs(delta))
        if delta.finish_reason is not None:
            yield from self._end("length" if delta.cuts_call else delta.finish_reason)

    def _end(self, reason: str) -> Iterator[wire.ResponseStreamEvent]:
        status, item_status, why = _ENDS.get(reason, ("completed", "completed", None))
        yield from self._output.end(item_status)
        response = self._answer
        response.status = status
        response.incomplete_details = None if why is None else wire.IncompleteDetails(why)
        response.completed_at = self._service.now() if status == "completed" else None
        response.usage = self._usage()
        kind: type[wire.WholeResponseEvent] = wire.Completed if status == "completed" else wire.Incomplete
        yield kind(response=response)

    def _logprobs(self, delta: AnswerDelta) -> list[TokenLogprob]:
        completion = delta.completion
        if not completion.logprobs:
            return []
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        return [self._tokens.token(*pair, self._body.top_logprobs or 0) for pair in pairs]

    def _usage(self) -> wire.ResponseUsage:
        usage = self._tally.usage
        return wire.ResponseUsage(
            usage.prompt_tokens,
            wire.InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            wire.OutputTokensDetails(self._thoughts.count(self._service.tokenizer, usage)),
            usage.total_tokens,
        )


def _response(
    service: ModelService, body: ResponsesBody, conversation: Conversation, answer_id: str, *, is_stored: bool
) -> wire.Response:
    """Return the response before it has any output."""
    return wire.Response(
        id=answer_id,
        created_at=service.now(),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=service.name,
        previous_response_id=body.previous_response_id,
        store=is_stored,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": None, "summary": None} if body.reasoning is None else msgspec.to_builtins(body.reasoning),
        safety_identifier=body.safety_identifier,
        temperature=conversation.params.temperature,
        text=_text(body),
        tool_choice=body.tool_choice or "auto",
        tools=[
            {"description": None, "parameters": None, "strict": False, **tool}
            for tool in body.tools or []
            if tool["type"] == "function"
        ],
        top_logprobs=body.top_logprobs or 0,
        top_p=conversation.params.top_p,
        user=body.user,
    )


def _text(body: ResponsesBody) -> dict[str, Any]:
    form, verbosity = (None, None) if body.text is None else (body.text.format, body.text.verbosity)
    if form is None or form.type != "json_schema":
        return {"format": {"type": "text" if form is None else form.type}, "verbosity": verbosity or "medium"}
    return {"format": msgspec.to_builtins(form), "verbosity": verbosity or "medium"}


def _error_code(error: ApiError) -> str:
    """Return one of the few codes that OpenAI defines."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else "invalid_prompt"
