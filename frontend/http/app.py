"""The ASGI application around the routes: request ids, host names, API keys, CORS, errors, access log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.frontend.errors import CONTEXT_LENGTH_EXCEEDED
from quire.frontend.http.dialects.registry import DIALECTS, dialect_at
from quire.frontend.http.documentation.operation import Operation
from quire.frontend.http.errors import CLIENT_CLOSED_REQUEST, ApiError, cut_off
from quire.frontend.http.models.served_model import ServedModel
from quire.frontend.http.models.served_models import HELD, MODEL, SERVICE, ServedModels
from quire.frontend.http.quotas import Quotas
from quire.frontend.http.routes import routes
from quire.frontend.http.service import BODY, ModelService
from quire.frontend.http.transport.auth import ApiKeys
from quire.frontend.http.transport.cors import Cors
from quire.frontend.http.transport.hosts import AllowedHosts
from quire.frontend.http.transport.ignored import add_ignored
from quire.frontend.http.transport.logs import access_log
from quire.frontend.http.transport.responses import REQUEST_ID, request_id_of
from quire.frontend.turns import LoopWork, doing
from quire.protocol.messages import Role

logger = logging.getLogger(__name__)

_PROMPT_FIELDS = {  # paths whose prompt field is not called "prompt"
    "/v1/chat/completions": "messages",
    "/v1/embeddings": "input",
    "/v1/responses": "input",
    **dict.fromkeys(("/classify", "/v1/classify", "/pooling", "/v1/pooling"), "input"),
    **dict.fromkeys(("/score", "/v1/score"), "text_1"),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "documents"),
    **{path: name for dialect in DIALECTS for path, name in dialect.prompt_fields.items()},
}
_REFUSED_WHILE_DRAINING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_APIS = ("/api/", "/v1/", "/v2/")  # where a path may end with a slash; links of a page would lead elsewhere


def make_app(models: ServedModels) -> ASGIApp:
    """Return the whole server as an ASGI application. Raises `ValueError` if API keys can't be read."""
    return Gateway(models, routes(models))


class Gateway:
    """Wraps every request: id, checks of host and API key, errors in the form of the API, access log."""

    def __init__(self, models: ServedModels, routes: Sequence[Route]) -> None:
        args = models.server.args
        self._models = models
        self._router = Router(routes, redirect_slashes=False)
        self._app: ASGIApp = Cors(self._respond, args)
        self._hosts = AllowedHosts(args)
        self._keys = ApiKeys(
            args.all_api_keys(),
            args.admin_keys(),
            share_prefix_cache=args.share_prefix_cache,
            metrics_without_key=args.metrics_without_key,
        )
        self._quotas = Quotas(args.max_requests_per_key, args.max_tokens_per_minute_per_key)
        models.loader.on_open(lambda _model, service: service.llm.add_observer(self._quotas))
        self._generating = {route.path for route in routes if isinstance(route, Operation) and route.generates}
        roles = {service.llm.engine_info.role for service in models.services}
        if len(self._keys) > 1 and not roles <= {Role.ADMIN}:
            logger.warning(
                "the API keys of this server share one turn at the engine, which knows it as a plain client; attach "
                "with an administrator's key to give each API key a turn of its own"
            )
        self._routes = routes
        self._paths: dict[Any, str] = {route.endpoint: route.path for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, as ASGI defines it."""
        if scope["type"] != "http":
            return
        if scope["path"].endswith("/") and _own_path(scope).startswith(_APIS):
            scope["path"] = scope["path"][:-1]
        request_id = scope.setdefault("request_id", request_id_of(Headers(scope=scope)))
        exchange = scope["exchange"] = HttpExchange(scope, send, request_id)
        scope["app"] = self  # makes the router raise for a wrong method
        try:
            await self._app(scope, receive, exchange.send)
        finally:
            self._record(scope, exchange)
            # The exchange refers to the scope: neither is left to the garbage collector. An idle connection keeps the
            # scope of its last request, and is to keep neither its body nor a model that has been unloaded.
            for name in ("exchange", HELD, SERVICE, BODY):
                scope.pop(name, None)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Route a request. It runs inside the CORS middleware, so that web pages can read errors too."""
        exchange: HttpExchange = scope["exchange"]
        try:
            with self._admitted(scope, Headers(scope=scope)):
                await self._router(scope, receive, send)
        except asyncio.CancelledError:  # the server is ending
            await exchange.refuse(cut_off(), scope, receive, send)
        except Exception as error:  # noqa: BLE001 - every failure gets a response
            # No variable keeps the answer, which may be the error itself: its traceback refers to this frame, and by
            # others to the body, which would stay until the garbage collector finds it.
            await exchange.refuse(self._answer_to(error, scope), scope, receive, send)

    def _answer_to(self, error: Exception, scope: Scope) -> ApiError:
        """Return the answer to a request that has failed."""
        api_error = self._http_error(error, scope) or self._api_error(error, scope)
        if api_error.code == CONTEXT_LENGTH_EXCEEDED and api_error.param is None:
            api_error.param = _PROMPT_FIELDS.get(self._paths.get(scope.get("endpoint"), ""), "prompt")
        return api_error

    def _api_error(self, error: Exception, scope: Scope) -> ApiError:
        service: ModelService | None = scope.get(SERVICE)
        if service is not None:
            return service.api_error(error)
        return self._models.server.api_error(error, self._models.retry_after)

    def _record(self, scope: Scope, exchange: HttpExchange) -> None:
        """Report the outcome to the access log and the metrics, which label routes and never client-chosen paths."""
        status = exchange.outcome or exchange.status
        access_log(scope, status, exchange.seconds, exchange.num_bytes, exchange.request_id)
        route = self._paths.get(scope.get("endpoint"), "other")
        model: ServedModel = scope.get(MODEL, self._models.default)
        model.metrics.http.request(route, scope["method"], status, exchange.seconds)

    def _http_error(self, error: Exception, scope: Scope) -> ApiError | None:
        """Return the router's own errors with messages that say what to do."""
        if not isinstance(error, HTTPException):
            return None
        if error.status_code == 405:
            path = _own_path(scope)
            here = (route.methods or set() for route in self._routes if route.path_regex.match(path))
            allowed = ", ".join(sorted(set().union(*here)))  # a path may have several routes
            return ApiError(405, f"this method is not allowed here; use {allowed}", headers={"Allow": allowed})
        is_unknown = error.status_code == 404
        message = "there is nothing at this path; /docs lists the endpoints" if is_unknown else error.detail
        return ApiError(error.status_code, message, headers=error.headers)

    @contextmanager
    def _admitted(self, scope: Scope, headers: Headers) -> Iterator[None]:
        """Hold a request open that may be served. Raises `ApiError` 401, 421, 429 or 503."""
        self._hosts.check(headers)
        path = _own_path(scope)
        caller = scope["caller"] = self._keys.check(path, headers, scope)
        with ExitStack() as stack:
            scope[HELD] = stack
            stack.enter_context(doing(LoopWork(caller.tenant)))
            if scope["method"] in _REFUSED_WHILE_DRAINING:
                self._models.server.check_open(lambda: self._models.retry_after)
                stack.enter_context(self._models.server.memory.admit())
            if path in self._generating:
                stack.enter_context(self._quotas.admit(caller.key, lambda: self._models.retry_after))
            yield


class HttpExchange:
    """One request and its response.

    `status` is the one sent, 0 before that; `outcome` is the final one where a failure followed, else 0.
    """

    def __init__(self, scope: Scope, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.status = 0
        self.outcome = 0
        self.num_bytes = 0
        self._scope = scope
        self._dialect = dialect_at(_own_path(scope))
        self._send = send
        self._began = time.perf_counter()

    async def send(self, message: Message) -> None:
        """Pass on what the application sends, with the request's id and what was ignored added to the headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers.append(REQUEST_ID, self.request_id)
            add_ignored(headers, self._scope)
            if self._dialect is not None and self._dialect.id_header is not None:
                headers.append(self._dialect.id_header, self.request_id)
        else:
            self.num_bytes += len(message.get("body", b""))
        await self._send(message)

    def error_response(self, error: ApiError) -> Response:
        """Return an error in the shape of the API that the client called."""
        shape = None if self._dialect is None else self._dialect.error_body
        return error.response(None if shape is None else shape(error, self.request_id))

    async def refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond with an error, unless a response has begun or the client has left."""
        if self.status == 0 and error.status != CLIENT_CLOSED_REQUEST:
            await self.error_response(error)(scope, receive, send)
        self.outcome = error.status

    @property
    def seconds(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self._began


def _own_path(scope: Scope) -> str:
    """Return the path of a request without the root path."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))
