"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.client.observer import TraceContext
from quire.frontend.http.conversation import Turn
from quire.frontend.http.dialects.anthropic.body import (
    FIELD_NAMES,
    MESSAGE_KEYS,
    CountBody,
    MessagesBody,
    PromptFields,
    chat_messages,
    ignored_blocks,
    server_tools,
    tool_use,
)
from quire.frontend.http.dialects.anthropic.writer import MessageWriter, TokenCount
from quire.frontend.http.errors import bad_request, errors_renamed
from quire.frontend.http.service import Endpoints
from quire.frontend.http.shared_fields import effort_kwargs, thinking_kwargs
from quire.frontend.http.transport.ignored import note_hosted, note_ignored
from quire.frontend.http.transport.responses import json_response, new_id
from quire.frontend.text.chat.message_keys import ignored_keys
from quire.protocol.messages import SAMPLING_RANGES, SamplingParams


class MessagesEndpoints(Endpoints):
    """Handlers of the Messages API."""

    async def create(self, request: Request) -> Response:
        """Answer a conversation with a `Message`, or with a stream of events."""
        service = self._service
        body = await service.read(request, MessagesBody)
        if body.thinking is not None:
            body.thinking.check(body.max_tokens)
        answer_id = new_id("msg", "_")
        params = self._params(body)
        turn = dataclasses.replace(
            await service.convert(request, lambda: self._turn(request, body, params)),
            **service.terms(request),
            trace=TraceContext("chat", request.headers, answer_id),
        )
        with errors_renamed(FIELD_NAMES):
            conversation = (await turn.begin(service)).fitted(service.llm.max_model_len)
        writer = MessageWriter(service, body, conversation, answer_id, request.scope["request_id"])
        events = writer.stream() if body.stream else None
        return await service.respond(request, writer.whole, events, writer.explain)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a prompt, which may exceed the context."""
        service = self._service
        body = await service.read(request, CountBody)
        turn = await service.convert(request, lambda: self._turn(request, body, SamplingParams()))
        tools = None if turn.tools is None else turn.tools.for_template()
        prompt = await service.llm.chat_prompt(turn.messages, tools=tools, **turn.template)
        return json_response(TokenCount(len(prompt.token_ids)))

    def _turn(self, request: Request, body: PromptFields, params: SamplingParams) -> Turn:
        note_ignored(request, ignored_keys(body.messages, MESSAGE_KEYS), "messages[].")
        ignored = ignored_blocks(body.messages)
        note_ignored(request, (f"{place} ({kind})" for place, kind in ignored.items()))
        note_hosted(request, server_tools(body.tools))
        messages = chat_messages(body.messages, body.system, ignored)
        return Turn(
            messages=messages,
            params=params,
            tools=tool_use(body.tools, body.tool_choice),
            structured_outputs=None if body.output_config is None else body.output_config.structured_outputs,
            format_field="output_config.format.schema",
            template=_template(body, messages[-1]),
        )

    def _params(self, body: MessagesBody) -> SamplingParams:
        given = {"stop": body.stop_sequences, "temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
        known = {name: value for name, value in given.items() if value is not None}
        SAMPLING_RANGES["max_tokens"].check(
            "max_tokens", body.max_tokens
        )  # the context may cut it, which hides the rest
        return SamplingParams(**{**self._service.defaults, **known, "max_tokens": body.max_tokens})


def _template(body: PromptFields, last: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the chat template; a final message of the assistant is continued."""
    effort = None if body.output_config is None else body.output_config.effort
    kwargs = effort_kwargs(effort, "output_config.effort")
    if body.thinking is not None:
        kwargs |= thinking_kwargs(body.thinking.type != "disabled")
    continues = last["role"] == "assistant"
    if continues and "tool_calls" in last:
        raise bad_request(
            "messages ends with a tool_use, whose tool_result is missing; give it in a message of the user", "messages"
        )
    if continues and not last["content"] and "reasoning_content" in last:
        raise bad_request(
            "messages ends with thoughts of the assistant, which can't be continued; give some text after them, or "
            "leave them out",
            "messages",
        )
    return {"add_generation_prompt": not continues, "continue_final_message": continues, "chat_template_kwargs": kwargs}
