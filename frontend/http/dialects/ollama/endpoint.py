"""`POST /api/generate` and `POST /api/chat`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.client.observer import TraceContext
from quire.frontend.http.conversation import Conversation, Turn, tools_of_chat
from quire.frontend.http.dialects.ollama.body import (
    MESSAGE_KEYS,
    GenerateBody,
    OllamaChatBody,
    OllamaGenerationBody,
    chat_messages,
)
from quire.frontend.http.dialects.ollama.names import answered_name
from quire.frontend.http.dialects.ollama.options import FIELD_NAMES, read_options
from quire.frontend.http.dialects.ollama.writer import (
    LOADED,
    AnswerWriter,
    ChatAnswer,
    ChatAnswerWriter,
    GeneratedText,
    TextWriter,
    now,
)
from quire.frontend.http.errors import bad_request, errors_renamed
from quire.frontend.http.server_state import load_seconds
from quire.frontend.http.service import Endpoints
from quire.frontend.http.transport.ignored import note_ignored
from quire.frontend.http.transport.responses import json_response, new_id
from quire.frontend.text.chat.assistant import AssistantParser
from quire.frontend.text.chat.history import may_fit, room_for_answer, without_oldest_turns
from quire.protocol.messages import SamplingParams

_FORMAT = "format"


class AnswerEndpoints(Endpoints):
    """Handlers of the endpoints that answer with text."""

    async def generate(self, request: Request) -> Response:
        """Answer a prompt with a `GeneratedText`, or with lines of it. An empty prompt only checks the model."""
        began = time.monotonic() - load_seconds(request)
        service = self._service
        body = await service.read(request, GenerateBody)
        name, params = self._checked(body, request)
        if not body.prompt:
            return json_response(GeneratedText(model=name, created_at=now(), done=True, done_reason=LOADED))
        with errors_renamed(FIELD_NAMES):
            if body.raw or not (service.has_chat_template or body.system):
                conversation = await self._continuation(body, body.prompt, params, request)
            else:
                turn = self._turn(body, _messages(body, body.prompt), params, request)
                conversation = await turn.begin(service)
        return await self._respond(request, body, TextWriter(service, self._fitted(conversation), name, began))

    async def chat(self, request: Request) -> Response:
        """Answer a conversation with a `ChatAnswer`, or with lines of it. Without messages it only checks the model."""
        began = time.monotonic() - load_seconds(request)
        service = self._service
        body = await service.read(request, OllamaChatBody)
        name, params = self._checked(body, request)
        turn = await service.convert(request, lambda: self._chat_turn(body, params, request))
        if turn is None:
            return json_response(ChatAnswer(model=name, created_at=now(), done=True, done_reason=LOADED))
        with errors_renamed(FIELD_NAMES):
            conversation, left_out = await self._begun(turn, body.truncate is not False)
        if left_out:
            note_ignored(request, [f"messages ({left_out} of the oldest beyond the context length)"])
        return await self._respond(request, body, ChatAnswerWriter(service, self._fitted(conversation), name, began))

    async def _begun(self, turn: Turn, truncates: bool) -> tuple[Conversation, int]:
        """Return the conversation of a turn, and how many of its messages were left out to make room for the answer.

        Raises `ValueError` or `ApiError`.
        """
        service, context = self._service, self._service.llm.max_model_len
        most = context - room_for_answer(turn.params.max_tokens, context)
        if not truncates or may_fit(turn.messages, most):
            conversation = await turn.begin(service)
            if not truncates or len(conversation.token_ids) <= most:
                return conversation, 0

        async def num_tokens(messages: list[Mapping[str, Any]]) -> int:
            return len((await dataclasses.replace(turn, messages=messages).prompt(service)).token_ids)

        kept = await without_oldest_turns(turn.messages, num_tokens, most)
        return await dataclasses.replace(turn, messages=kept).begin(service), len(turn.messages) - len(kept)

    def _checked(self, body: OllamaGenerationBody, request: Request) -> tuple[str, SamplingParams]:
        """Return the model's name for the answer, and the sampling parameters. Raises `ApiError` or `ValueError`."""
        service = self._service
        name = answered_name(service, body.model)
        service.timeout(request)
        body.check()
        if body.think and service.llm.answer_format.reasoning_parser is None:
            raise bad_request(f'think={body.think!r} is not possible: "{name}" does not support thinking', "think")
        options, unknown = read_options(body.options)
        params = options.sampling_params(service.defaults)
        note_ignored(request, [*options.ignored(params, service.llm.max_model_len), *unknown], "options.")
        return name, params

    def _chat_turn(self, body: OllamaChatBody, params: SamplingParams, request: Request) -> Turn | None:
        """Return the request of a chat, None if it has no messages. Raises `ApiError` 400."""
        tools = tools_of_chat(request, body.messages or (), body.tools, known_keys=MESSAGE_KEYS)
        if not body.messages:
            return None
        turn = self._turn(body, chat_messages(body.messages), params, request)
        return dataclasses.replace(turn, tools=tools)

    def _turn(
        self, body: OllamaGenerationBody, messages: list[dict[str, Any]], params: SamplingParams, request: Request
    ) -> Turn:
        service = self._service
        continues = _is_continued(messages[-1])
        return Turn(
            messages=messages,
            params=params,
            template={
                "add_generation_prompt": not continues,
                "continue_final_message": continues,
                "chat_template_kwargs": body.template_kwargs(),
            },
            **service.terms(request),
            trace=TraceContext("chat", request.headers, new_id("chat")),
            structured_outputs=body.structured_outputs,
            format_field=_FORMAT,
        )

    async def _continuation(
        self, body: GenerateBody, prompt: str, params: SamplingParams, request: Request
    ) -> Conversation:
        """Return the conversation that continues a prompt as it is. Raises `ValueError` or `ApiError`."""
        service = self._service
        for name in ("system", "think"):
            if getattr(body, name):
                raise bad_request(f"{name} is for the chat template, which raw=true leaves out", name)
        service.check_count(1, params)
        (made,) = await service.llm.prompts([prompt])
        return Conversation(
            token_ids=made.token_ids,
            params=msgspec.structs.replace(params, structured_outputs=body.structured_outputs),
            new_parser=AssistantParser,
            format_field=_FORMAT,
            **service.terms(request),
            trace=TraceContext("text_completion", request.headers, new_id("cmpl")),
        )

    def _fitted(self, conversation: Conversation) -> Conversation:
        return conversation.fitted(self._service.llm.max_model_len)

    async def _respond(self, request: Request, body: OllamaGenerationBody, writer: AnswerWriter[Any]) -> Response:
        lines = writer.stream() if body.stream is not False else None
        return await self._service.respond(request, writer.whole, lines, writer.explain, writer.form)


def _messages(body: GenerateBody, prompt: str) -> list[dict[str, Any]]:
    """Return a prompt and the system's as a conversation."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    return [*system, {"role": "user", "content": prompt}]


def _is_continued(last: Mapping[str, Any]) -> bool:
    """Return whether the answer continues the last message, which is then the assistant's. Raises `ApiError` 400."""
    if last["role"] != "assistant":
        return False
    if "tool_calls" in last:
        raise bad_request(
            "messages ends with tool_calls, whose results are missing; give them with role 'tool'", "messages"
        )
    if not last["content"] and "reasoning_content" in last:
        raise bad_request(
            "messages ends with thoughts of the assistant, which can't be continued; give some text after them, or "
            "leave them out",
            "messages",
        )
    return True
