"""`POST /v1/responses`: answer a conversation of items with items."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.client.observer import TraceContext
from quire.frontend.http.conversation import Turn
from quire.frontend.http.errors import bad_request, errors_renamed
from quire.frontend.http.openai.fields import sampling_params
from quire.frontend.http.openai.responses.body import ResponsesBody, messages_of, tool_use
from quire.frontend.http.openai.responses.history import Keeper, conversation_before, decoded, input_items
from quire.frontend.http.openai.responses.writer import ResponseWriter
from quire.frontend.http.response_database import StoredItem
from quire.frontend.http.service import Endpoints
from quire.frontend.http.shared_fields import effort_kwargs
from quire.frontend.http.transport.ignored import note_hosted, note_ignored
from quire.frontend.http.transport.responses import new_id
from quire.frontend.text.chat.tools import hosted_tools


class ResponsesEndpoint(Endpoints):
    """Handler of the endpoint."""

    async def create(self, request: Request) -> Response:
        """Answer a conversation with a `Response`, or with a stream of events."""
        service = self._service
        body = await service.read(request, ResponsesBody)
        body.check(service.responses is not None)
        answer_id = new_id("resp", "_", body.request_id)
        before = await self._before(body, request)
        with errors_renamed(body.field_names):
            turn = await service.convert(request, lambda: self._turn(body, request, answer_id, before))
            conversation = await turn.begin(service)
        writer = ResponseWriter(service, body, conversation, answer_id, self._keeper(body, request, before))
        events = writer.stream() if body.stream else None
        return await service.respond(request, writer.whole, events, writer.explain)

    async def _before(self, body: ResponsesBody, request: Request) -> Sequence[StoredItem]:
        """Return the conversation that the request goes on with. Raises `ApiError` 400 or 503."""
        if body.previous_response_id is None:
            return ()
        service = self._service
        store = service.responses
        assert store is not None  # the body has been checked
        return await conversation_before(
            store, service.caller(request).key, body.previous_response_id, service.args.max_body_bytes
        )

    def _keeper(self, body: ResponsesBody, request: Request, before: Sequence[StoredItem]) -> Keeper | None:
        store = self._service.responses
        if store is None or body.store is False:
            return None
        if "/" in (body.request_id or ""):
            raise bad_request(
                f"request_id={body.request_id!r} has a slash, with which a stored response can't be found; leave it "
                "out, or set store to false",
                "request_id",
            )
        return Keeper(store, self._service.caller(request).key, before, input_items(body.input))

    def _turn(self, body: ResponsesBody, request: Request, answer_id: str, before: Sequence[StoredItem]) -> Turn:
        service = self._service
        note_ignored(request, body.ignored())
        note_hosted(request, hosted_tools(body.tools))
        if isinstance(body.tool_choice, dict):
            note_hosted(request, hosted_tools(body.tool_choice.get("tools")), "tool_choice.tools")
        effort = effort_kwargs(None if body.reasoning is None else body.reasoning.effort, "reasoning.effort")
        kwargs = {**effort, **(body.chat_template_kwargs or {})}
        return Turn(
            messages=messages_of(body.input, body.instructions, decoded(before)),
            params=sampling_params(body, service.defaults, body.max_output_tokens, body.num_logprobs),
            tools=tool_use(body.tools, body.tool_choice, body.parallel_tool_calls),
            template={"chat_template_kwargs": kwargs},
            truncate=body.truncate_prompt_tokens,
            priority=body.priority or 0,
            **service.terms(request, body.cache_salt, body.session),
            structured_outputs=body.format,
            format_field="text.format.schema",
            trace=TraceContext("chat", request.headers, answer_id),
        )
