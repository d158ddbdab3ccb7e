"""The origins of web pages that may call the server (CORS)."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.frontend.http.args import NO_ORIGIN, ServerArgs
from quire.frontend.http.errors import bad_request
from quire.frontend.http.transport.ignored import IGNORED
from quire.frontend.http.transport.responses import REQUEST_ID

LOCAL_ORIGINS = (
    r"https?://(?:localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\])(?::[0-9]{1,5})?"
    r"|(?:app|file|tauri|vscode-webview|vscode-file)://[!-~]*"
)
"""Pages on this machine: those of its own servers, at any port, and of programs that show pages of their own.

They are Ollama's. No page of a stranger has such an origin. `null` is none of them: pages that are files have it, but
any page in a sandboxed frame has it too.
"""

_OPERATORS_PATHS = ("/view/", "/metrics")  # where pages could see what others do; only origins of the flag may


class Cors(CORSMiddleware):
    """Allows calls from pages of other origins: those of `--allowed-origins`, or else pages on this machine.

    Credentials that a browser holds are never asked for, so such a page needs an API key of its own. Rejections have
    the shape of all other errors.
    """

    def __init__(self, app: ASGIApp, args: ServerArgs) -> None:
        self._are_given = bool(args.allowed_origins)
        super().__init__(
            app,
            allow_origins=[origin for origin in args.allowed_origins if origin != NO_ORIGIN],
            allow_origin_regex=None if self._are_given else LOCAL_ORIGINS,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, IGNORED],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, as ASGI defines it."""
        origin = Headers(scope=scope).get("origin")
        path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
        is_preflight = scope["method"] == "OPTIONS"
        if not self._are_given and path.startswith(_OPERATORS_PATHS):
            await self.app(scope, receive, send)
        elif origin is None or is_preflight or self.is_allowed_origin(origin):
            await super().__call__(scope, receive, send)
        else:  # without headers that mean nothing to this origin
            await self.app(scope, receive, send)

    def preflight_response(self, request_headers: Headers) -> Response:
        """Answer a browser's preflight request."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        reason = bytes(response.body).decode()
        message = f"{reason}; start the server with --allowed-origins to allow pages of this origin"
        return bad_request(message).response()
