"""Writer of a conversation's answer as a response, complete or as events."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec

from quire.frontend.http.conversation import AnswerDelta, Conversation
from quire.frontend.http.errors import ApiError, errors_renamed
from quire.frontend.http.openai.logprobs import TokenLogprob, TokenWriter
from quire.frontend.http.openai.responses.body import ResponsesBody
from quire.frontend.http.openai.responses.events import (
    Completed,
    Created,
    Error,
    Failed,
    Incomplete,
    InProgress,
    ResponseStreamEvent,
    WholeResponseEvent,
)
from quire.frontend.http.openai.responses.output import ResponseOutput
from quire.frontend.http.openai.responses.response import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
)
from quire.frontend.http.service import ModelService
from quire.frontend.http.transport.sse import event
from quire.frontend.http.usage import Thoughts, TokenTally

# Finish reason -> status of the response, status of its last item, and OpenAI's reason why it is incomplete (or ours,
# where OpenAI has none).
_ENDS = {
    "length": ("incomplete", "incomplete", "max_output_tokens"),
    "timeout": ("incomplete", "incomplete", "timeout"),
    "abort": ("cancelled", "incomplete", None),
}


class ResponseWriter:
    """Writes one response."""

    def __init__(self, service: ModelService, body: ResponsesBody, conversation: Conversation, answer_id: str) -> None:
        self._service = service
        self._body = body
        self._conversation = conversation
        self._tokens = TokenWriter(service.tokenizer, bool(body.return_tokens_as_token_ids))
        self._output = ResponseOutput()
        self._thoughts = Thoughts()
        self._tally = TokenTally()
        self._begun = False
        self._response = _response(service, body, conversation, answer_id)
        self._response.output = self._output.items
        self._numbers = itertools.count()

    async def whole(self) -> Response:
        """Return the complete response."""
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        return self._response

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events."""
        async with aclosing(self._events()) as events:
            async for each in events:
                yield self._encoded(each)

    def explain(self, error: Exception) -> bytes:
        """Return the last events of a failed stream."""
        api_error = self._service.api_error(error)
        self._response.status = "failed"
        self._response.error = ResponseError(_error_code(api_error), api_error.message)
        event_of_error = Error(code=api_error.code, message=api_error.message, param=api_error.param)
        return self._encoded(event_of_error) + self._encoded(Failed(response=self._response))

    def _encoded(self, each: ResponseStreamEvent) -> bytes:
        each.sequence_number = next(self._numbers)
        return event(msgspec.json.encode(each), each.name)

    async def _events(self) -> AsyncGenerator[ResponseStreamEvent, None]:
        """Yield the events; encode each before taking the next, since their contents keep growing."""
        with errors_renamed(self._body.field_names):
            async with aclosing(self._conversation.deltas(self._service.llm)) as deltas:
                async for delta in deltas:
                    for each in self._take(delta):
                        yield each

    def _take(self, delta: AnswerDelta) -> Iterator[ResponseStreamEvent]:
        if not self._begun:
            self._begun = True
            yield Created(response=self._response)
            yield InProgress(response=self._response)
        self._tally.add_delta(delta.output, delta.completion)
        self._thoughts.add_events(delta.completion.index, delta.events)
        yield from self._output.take(delta.events, self._logprobs(delta))
        if delta.finish_reason is not None:
            yield from self._end(delta.finish_reason)

    def _end(self, reason: str) -> Iterator[ResponseStreamEvent]:
        status, item_status, why = _ENDS.get(reason, ("completed", "completed", None))
        yield from self._output.end(item_status)
        response = self._response
        response.status = status
        response.incomplete_details = None if why is None else IncompleteDetails(why)
        response.completed_at = self._service.now() if status == "completed" else None
        response.usage = self._usage()
        kind: type[WholeResponseEvent] = Completed if status == "completed" else Incomplete
        yield kind(response=response)

    def _logprobs(self, delta: AnswerDelta) -> list[TokenLogprob]:
        completion = delta.completion
        if not completion.logprobs:
            return []
        return self._tokens.chat(completion.logprobs, completion.token_ids, self._body.top_logprobs or 0).content

    def _usage(self) -> ResponseUsage:
        usage = self._tally.usage
        return ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(self._thoughts.count(self._service.tokenizer, usage)),
            usage.total_tokens,
        )


def _response(service: ModelService, body: ResponsesBody, conversation: Conversation, answer_id: str) -> Response:
    """Return the response before it has any output."""
    return Response(
        id=answer_id,
        created_at=service.now(),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=service.name,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": None, "summary": None} if body.reasoning is None else msgspec.to_builtins(body.reasoning),
        safety_identifier=body.safety_identifier,
        temperature=conversation.params.temperature,
        text=_text(body),
        tool_choice=body.tool_choice or "auto",
        tools=[{"description": None, "parameters": None, "strict": False, **tool} for tool in body.tools or []],
        top_logprobs=body.top_logprobs or 0,
        top_p=conversation.params.top_p,
        user=body.user,
    )


def _text(body: ResponsesBody) -> dict[str, Any]:
    form = None if body.text is None else body.text.format
    if form is None or form.type != "json_schema":
        return {"format": {"type": "text" if form is None else form.type}, "verbosity": "medium"}
    return {"format": msgspec.to_builtins(form), "verbosity": "medium"}


def _error_code(error: ApiError) -> str:
    """Return one of the few codes that OpenAI defines."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else "invalid_prompt"
