"""`POST /v1/responses`: answer a conversation of items with items; and the stored responses below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.client.observer import TraceContext
from quire.frontend.http.conversation import Turn
from quire.frontend.http.errors import ApiError, bad_request, errors_renamed
from quire.frontend.http.openai.fields import sampling_params
from quire.frontend.http.openai.responses.body import ResponsesBody, messages_of, tool_use
from quire.frontend.http.openai.responses.history import (
    DeletedResponse,
    Keeper,
    conversation_before,
    decoded,
    input_items,
    is_id,
    not_found,
    page_of,
)
from quire.frontend.http.openai.responses.writer import ResponseWriter
from quire.frontend.http.response_database import StoredItem, StoredResponse
from quire.frontend.http.response_store import ResponseStore
from quire.frontend.http.service import Endpoints
from quire.frontend.http.shared_fields import effort_kwargs
from quire.frontend.http.transport.ignored import note_hosted, note_ignored
from quire.frontend.http.transport.responses import json_response, new_id
from quire.frontend.text.chat.tools import hosted_tools

MOST_ITEMS = 100
"""Items of a page."""


class ResponsesEndpoint(Endpoints):
    """Handlers of the Responses API."""

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

    async def stored(self, request: Request) -> Response:
        """Reject a request for a stored response. Raises `ApiError` 404."""
        name = request.path_params["id"].partition("/")[0]
        raise ApiError(
            404,
            f"there is no response {name!r}: this server stores none; keep the answer of POST /v1/responses, or start "
            "the server with --response-store PATH",
            code="response_not_found",
            param="response_id",
        )

    async def retrieve(self, request: Request) -> Response:
        """Return a stored response. Those that failed or were cut off are stored as far as they came."""
        response_id = request.path_params["id"]
        _check_query(request, ("include", "include[]", "include_obfuscation", "stream"))
        if request.query_params.get("stream", "false") != "false":
            raise bad_request("stream is not supported: a stored response has ended; leave it out", "stream")
        found = (
            await self._store.response(self._service.caller(request).key, response_id) if is_id(response_id) else None
        )
        if found is None:
            raise not_found(response_id)
        return Response(found, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Delete a stored response. Those that went on from it keep what they have of its conversation."""
        response_id = request.path_params["id"]
        if not is_id(response_id) or not await self._store.delete(self._service.caller(request).key, response_id):
            raise not_found(response_id)
        return json_response(DeletedResponse(response_id))

    async def cancel(self, request: Request) -> Response:
        """Reject the cancelling of a response. Raises `ApiError` 400 or 404."""
        await self._found(request)
        raise bad_request(
            "only responses with background=true can be cancelled, and this server has none; close the connection of a "
            "request to end it"
        )

    async def input_items(self, request: Request) -> Response:
        """List the items from which a stored response was made. They are the whole conversation before it."""
        found = await self._found(request)
        query = _check_query(request, ("after", "include", "include[]", "limit", "order"))
        limit, order = query.get("limit", "20"), query.get("order", "desc")
        if not (limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= MOST_ITEMS):
            raise bad_request(f"limit={limit!r} is not allowed; give 1 to {MOST_ITEMS}", "limit")
        if order not in ("asc", "desc"):
            raise bad_request(f"order={order!r} is not known; give asc or desc", "order")
        return json_response(page_of(found.input, int(limit), order, query.get("after")))

    async def conversations(self, _request: Request) -> Response:
        """Reject a request of the Conversations API. Raises `ApiError` 404."""
        raise ApiError(
            404,
            "this server keeps no conversations: go on from a response with previous_response_id, for which the server "
            "is started with --response-store PATH, or send the whole conversation as input",
            code="unsupported",
        )

    async def _found(self, request: Request) -> StoredResponse:
        response_id = request.path_params["id"]
        found = await self._store.get(self._service.caller(request).key, response_id) if is_id(response_id) else None
        if found is None:
            raise not_found(response_id)
        return found

    @property
    def _store(self) -> ResponseStore:
        store = self._service.responses
        assert store is not None  # else these endpoints are no routes
        return store

    async def _before(self, body: ResponsesBody, request: Request) -> Sequence[StoredItem]:
        """Return the conversation that the request goes on with. Raises `ApiError` 400 or 503."""
        if body.previous_response_id is None:
            return ()
        service = self._service
        return await conversation_before(
            self._store, service.caller(request).key, body.previous_response_id, service.args.max_body_bytes
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


def _check_query(request: Request, known: Sequence[str]) -> Mapping[str, str]:
    """Return the query of a request. Raises `ApiError` 400 for a parameter that is not `known`."""
    for name in request.query_params:
        if name not in known:
            raise bad_request(f"{name} is not a known parameter; known are {', '.join(known)}", name)
    return request.query_params
