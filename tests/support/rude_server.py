"""An HTTP server that responds as a test wants: correctly, wrongly or not at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

Answer = Callable[["Exchange"], None]


class Exchange(BaseHTTPRequestHandler):
    """One connection; `body` is the latest one that the client sent."""

    protocol_version = "HTTP/1.1"
    body: dict[str, Any]
    server: RudeServer

    def do_GET(self) -> None:
        """Serve one of the server's `pages`."""
        page = self.server.pages.get(self.path)
        self.whole(404 if page is None else 200, json.dumps(page or {}).encode())

    def do_POST(self) -> None:
        """Answer a completion as the test wants."""
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path == "/reset_prefix_cache":
            self.whole(404, b"")
            return
        self.server.bodies.append(self.body)
        self.server.connections.add(self.client_address)
        self.server.headers.append(dict(self.headers))
        self.server.answer(self)

    def whole(self, status: int, body: bytes, **headers: str) -> None:
        """Send a response with a Content-Length."""
        self.begin(status, Content_Length=str(len(body)), **headers)
        self.wfile.write(body)

    def begin(self, status: int = 200, **headers: str) -> None:
        """Send the headers."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def stream(self, *pieces: bytes) -> None:
        """Send a complete stream, each piece as a chunk."""
        self.begin(Content_Type="text/event-stream", Transfer_Encoding="chunked")
        for piece in pieces:
            self.chunk(piece)
        self.wfile.write(b"0\r\n\r\n")

    def chunk(self, piece: bytes) -> None:
        """Send a piece of a stream."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))

    def drop(self) -> None:
        """End the connection."""
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class RudeServer(ThreadingHTTPServer):
    """Keeps the requests that it receives, any number of them per connection."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Exchange)
        self.answer = answer
        self.pages: dict[str, Any] = {"/v1/models": {"data": [{"id": "rude", "max_model_len": 64}]}}
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.connections: set[tuple[str, int]] = set()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def handle_error(self, *_: object) -> None:
        """Ignore clients that have disconnected."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


def event(text: str | None = None, **more: Any) -> bytes:
    """Return a chunk of a completion as an event."""
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": more.pop("finish_reason", None)}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
