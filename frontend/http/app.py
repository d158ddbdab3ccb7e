"""The ASGI application: what happens around every route."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.frontend.errors import CONTEXT_LENGTH_EXCEEDED
from quire.frontend.http.anthropic.errors import error_body, is_anthropic
from quire.frontend.http.errors import CLIENT_CLOSED_REQUEST, ApiError, bad_request, cut_off
from quire.frontend.http.routes import routes
from quire.frontend.http.service import Service
from quire.frontend.http.transport.auth import ApiKeys
from quire.frontend.http.transport.ids import REQUEST_ID, request_id_of
from quire.frontend.http.transport.logs import access_log

ANTHROPIC_REQUEST_ID = "request-id"
_PROMPT_FIELDS = {  # where it is not called "prompt"
    "/v1/chat/completions": "messages",
    "/v1/embeddings": "input",
    "/v1/messages": "messages",
    "/v1/responses": "input",
}
_WORKING = frozenset({"POST", "PUT", "PATCH", "DELETE"})


def make_app(service: Service) -> ASGIApp:
    """The whole server as an ASGI application. Raises `ValueError` for API keys that can't be read."""
    return Gateway(service, routes(service))


class Gateway:
    """Around every request: its id, the API key, errors as the API has them, and a line in the access log."""

    def __init__(self, service: Service, known: Sequence[Route]) -> None:
        self._service = service
        self._router = Router(known, redirect_slashes=False)
        self._app: ASGIApp = self._answer
        if service.args.allowed_origins:
            self._app = Cors(
                self._answer,
                allow_origins=service.args.allowed_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=[REQUEST_ID],
            )
        self._keys = ApiKeys(service.args.all_api_keys())
        self._paths: dict[Any, str] = {route.endpoint: route.path for route in known}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            return
        request_id = scope.setdefault("request_id", request_id_of(Headers(scope=scope)))
        exchange = scope["exchange"] = Exchange(scope, send, request_id)
        scope["app"] = self  # so that the router raises for a wrong method
        try:
            await self._app(scope, receive, exchange.send)
        finally:
            self._tell(scope, exchange)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What CORS has nothing against, and makes readable for web pages: refusals too."""
        exchange: Exchange = scope["exchange"]
        try:
            self._admit(scope, Headers(scope=scope))
            await self._router(scope, receive, send)
        except asyncio.CancelledError:  # the server ends
            await exchange.refuse(cut_off(), scope, receive, send)
        except Exception as error:  # noqa: BLE001 - whatever it is, it gets an answer
            refusal = _http_error(error) or self._service.refusal(error)
            if refusal.code == CONTEXT_LENGTH_EXCEEDED and refusal.param is None:
                refusal.param = _PROMPT_FIELDS.get(self._paths.get(scope.get("endpoint"), ""), "prompt")
            await exchange.refuse(refusal, scope, receive, send)

    def _tell(self, scope: Scope, exchange: Exchange) -> None:
        """What became of it, to the access log and the metrics; these know routes, not what a client has written."""
        status = exchange.outcome or exchange.status
        access_log(scope, status, exchange.seconds, exchange.num_bytes, exchange.request_id)
        route = self._paths.get(scope.get("endpoint"), "other")
        self._service.metrics.http.request(route, scope["method"], status, exchange.seconds)

    def _admit(self, scope: Scope, headers: Headers) -> None:
        self._keys.check(scope["path"].removeprefix(scope.get("root_path", "")), headers)
        if self._service.draining and scope["method"] in _WORKING:
            raise ApiError(
                503,
                "the server is shutting down and takes no more requests; send it to another one",
                code="shutting_down",
                headers={"Retry-After": str(self._service.retry_after), "Connection": "close"},
            )


class Cors(CORSMiddleware):
    """Lets web pages of other origins call; what it refuses is told in the shape of all errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """What a browser is told that asks whether it may."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        words = bytes(response.body).decode()
        return bad_request(f"{words}; start the server with --allowed-origins for pages that may call").response()


class Exchange:
    """One request and its answer. `outcome` is the status that it came to if another one had been sent already."""

    def __init__(self, scope: Scope, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.status = 0
        self.outcome = 0
        self.num_bytes = 0
        self._is_anthropic = is_anthropic(scope["path"].removeprefix(scope.get("root_path", "")))
        self._send = send
        self._began = time.perf_counter()

    async def send(self, message: Message) -> None:
        """What the application sends, with the request's id among the headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers.append(REQUEST_ID, self.request_id)
            if self._is_anthropic:
                headers.append(ANTHROPIC_REQUEST_ID, self.request_id)
        else:
            self.num_bytes += len(message.get("body", b""))
        await self._send(message)

    def answer(self, refusal: ApiError) -> Response:
        """A refusal in the shape of the API that was asked."""
        return refusal.response(error_body(refusal, self.request_id) if self._is_anthropic else None)

    async def refuse(self, refusal: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with an error, if there is no answer yet and somebody to read it."""
        if self.status == 0 and refusal.status != CLIENT_CLOSED_REQUEST:
            await self.answer(refusal)(scope, receive, send)
        self.outcome = refusal.status

    @property
    def seconds(self) -> float:
        """Since it came."""
        return time.perf_counter() - self._began


def _http_error(error: Exception) -> ApiError | None:
    """The router's own refusals in our words."""
    if not isinstance(error, HTTPException):
        return None
    words: dict[int, Callable[[], str]] = {
        404: lambda: "there is nothing here; /docs lists what there is",
        405: lambda: f"this method is not allowed here; allowed is {(error.headers or {}).get('Allow', 'another one')}",
    }
    message = words.get(error.status_code, lambda: error.detail)()
    return ApiError(error.status_code, message, headers=error.headers)
