"""The stored responses below `/v1/responses`, for which no model is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.errors import ApiError, bad_request
from quire.frontend.http.openai.responses.history import DeletedResponse, is_id, not_found, page_of
from quire.frontend.http.response_database import StoredResponse
from quire.frontend.http.response_store import ResponseStore
from quire.frontend.http.server_state import ServerState, caller_of
from quire.frontend.http.transport.responses import json_response

MOST_ITEMS = 100
"""Items of a page."""


class StoredResponsesEndpoints:
    """Handlers of the endpoints."""

    def __init__(self, server: ServerState) -> None:
        self._server = server

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
        found = await self._store.response(caller_of(request).key, response_id) if is_id(response_id) else None
        if found is None:
            raise not_found(response_id)
        return Response(found, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Delete a stored response. Those that went on from it keep what they have of its conversation."""
        response_id = request.path_params["id"]
        if not is_id(response_id) or not await self._store.delete(caller_of(request).key, response_id):
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
        found = await self._store.get(caller_of(request).key, response_id) if is_id(response_id) else None
        if found is None:
            raise not_found(response_id)
        return found

    @property
    def _store(self) -> ResponseStore:
        store = self._server.responses
        assert store is not None  # else these endpoints are no routes
        return store


def _check_query(request: Request, known: Sequence[str]) -> Mapping[str, str]:
    """Return the query of a request. Raises `ApiError` 400 for a parameter that is not `known`."""
    for name in request.query_params:
        if name not in known:
            raise bad_request(f"{name} is not a known parameter; known are {', '.join(known)}", name)
    return request.query_params
