"""Web pages on this machine may call the server, those of strangers may not, and none may watch others."""

from __future__ import annotations

import threading
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from http_server import Reply, Server
from raw_http import RawConnection

from quire.frontend.http.args import ServerArgs

if TYPE_CHECKING:
    from playwright.sync_api import Browser

COMPLETIONS = "/v1/completions"
GOOD: Any = {"prompt": "Once upon", "max_tokens": 1}
LOCAL = [
    "http://localhost",
    "https://localhost:3000",
    "http://127.0.0.1:5173",
    "http://[::1]:8080",
    "http://0.0.0.0:3000",
    "app://obsidian.md",
    "file://",
    "tauri://localhost",
    "vscode-webview://0a1b2c",
    "vscode-file://vscode-app",
]
FOREIGN = [
    "null",
    "http://page.test",
    "http://localhost.page.test",
    "http://localhost:80.page.test",
    "http://localhost:",
    "http://localhost:123456",
    "http://evil-localhost",
    "http://localhost@page.test",
    "http://127.0.0.1.page.test:80",
    "http://127.0.0.2",
    "http://page.test#http://localhost",
    "ftp://localhost",
    "chrome-extension://abc",
    "xapp://x",
    "HTTP://LOCALHOST",
    "",
]


def preflight(server: Server, origin: str, path: str = COMPLETIONS, method: str = "POST") -> Reply:
    """Send what a browser asks before it sends a page's JSON."""
    asked = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": "authorization,content-type"}
    return server.request(path, method="OPTIONS", headers={"Origin": origin, **asked})


def cors_headers(reply: Reply) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name.startswith("access-control-")}


@pytest.mark.parametrize("origin", LOCAL)
def test_pages_on_this_machine_may_call(server: Server, origin: str) -> None:
    asked = preflight(server, origin)
    assert (asked.status, asked.headers["access-control-allow-origin"]) == (200, origin)
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    answer = server.request(COMPLETIONS, GOOD, headers={"Origin": origin})
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, origin)
    assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    assert "origin" in answer.headers["vary"].lower()
    error = server.request(COMPLETIONS, {}, headers={"Origin": origin})
    assert (error.status, error.headers["access-control-allow-origin"]) == (400, origin)
    assert not [name for reply in (asked, answer, error) for name in reply.headers if "credentials" in name]


@pytest.mark.parametrize("origin", FOREIGN)
def test_pages_of_strangers_may_not(server: Server, origin: str) -> None:
    asked = preflight(server, origin)
    assert (asked.status, "--allowed-origins" in asked.error["message"]) == (400, True)
    assert "access-control-allow-origin" not in asked.headers
    assert not cors_headers(server.request("/v1/models", headers={"Origin": origin}))
    form = {"Origin": origin, "Content-Type": "text/plain"}  # which browsers send without asking
    for path, body in (("/api/generate", b'{"prompt": "x"}'), ("/completion", b'{"prompt": "x"}')):
        assert server.request(path, body, headers=form).status == 415


def test_a_domain_that_resolves_to_this_machine_gains_nothing(server: Server) -> None:
    """A page of the domain is of the same origin as what it asks for, so that only the name it uses tells."""
    for origin in ("http://page.test:8000", "http://localhost:3000"):
        with RawConnection(server.url) as connection:
            request = (
                f"GET /v1/models HTTP/1.1\r\nHost: page.test:8000\r\nOrigin: {origin}\r\nConnection: close\r\n\r\n"
            )
            reply = connection.send(request.encode()).reply()
            assert (reply.status, reply.error["code"]) == (421, "host_not_allowed")


@pytest.mark.parametrize("path", ["/metrics", "/view/events"])
def test_no_page_may_watch_others(server: Server, path: str) -> None:
    asked = preflight(server, LOCAL[0], path, "GET")
    assert asked.status == 405
    assert not cors_headers(asked)
    if path == "/metrics":  # the other is endless
        assert not cors_headers(server.request(path, headers={"Origin": LOCAL[0]}))


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    """Start a server with an API key, below a path."""
    with Server.start("--api-key", "sk", "--root-path", "/quire") as server:
        server.url = server.url.removesuffix("/quire")
        yield server


def test_a_page_needs_an_api_key_of_its_own(locked: Server) -> None:
    origin = {"Origin": LOCAL[0]}
    assert preflight(locked, LOCAL[0]).status == 200
    without = locked.request(COMPLETIONS, GOOD, headers=origin)
    assert (without.status, without.headers["access-control-allow-origin"]) == (401, LOCAL[0])
    stored = {**origin, "Authorization": f"Basic {b64encode(b'x:sk').decode()}"}  # may be sent, but a page can't read
    assert "access-control-allow-credentials" not in locked.request(COMPLETIONS, GOOD, headers=stored).headers
    assert locked.request(COMPLETIONS, GOOD, headers={**origin, "Authorization": "Bearer sk"}).status == 200
    assert preflight(locked, LOCAL[0], "/metrics", "GET").status == 401


@pytest.fixture(scope="module")
def closed() -> Iterator[Server]:
    """Start a server that no page may call."""
    with Server.start("--allowed-origins", "none") as server:
        yield server


def test_flags_replace_the_defaults(closed: Server) -> None:
    for origin in (*LOCAL, "none", "null"):
        assert preflight(closed, origin).status == 400
        assert not cors_headers(closed.request("/v1/models", headers={"Origin": origin}))


@pytest.mark.parametrize(
    "origin", ["http://page.test/", "page.test", "http://", "http://page.test/path", "http:// x", ""]
)
def test_what_is_no_origin_is_rejected(origin: str) -> None:
    with pytest.raises(ValueError, match="is not an origin; give scheme, host and port"):
        ServerArgs(allowed_origins=(origin,))


def test_no_page_and_some_page_contradict() -> None:
    with pytest.raises(ValueError, match="allowed_origins has 'none' and others"):
        ServerArgs(allowed_origins=("none", "*"))
    assert ServerArgs(allowed_origins=("*", "null", "app://x")).allowed_origins == ("*", "null", "app://x")


class _EmptyPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>x</title>")

    def log_message(self, *_: Any) -> None:
        """Be silent."""


@pytest.fixture
def other_port() -> Iterator[int]:
    """Serve an empty page at another port, as a front end on this machine does."""
    pages = ThreadingHTTPServer(("127.0.0.1", 0), _EmptyPage)
    thread = threading.Thread(target=pages.serve_forever)
    thread.start()
    yield pages.server_port
    pages.shutdown()
    thread.join()
    pages.server_close()


ASK = """async ([url, body]) => {
    const options = body ? {method: "POST", headers: {"Content-Type": "application/json"}, body} : {};
    try { return (await (await fetch(url, options)).text()) } catch (error) { return `failed: ${error}` }
}"""


def test_a_browser_lets_pages_on_this_machine_read(browser: Browser, server: Server, other_port: int) -> None:
    """A subdomain of localhost resolves to this machine too, and stands for the page of a stranger."""
    found = {}
    for host in ("127.0.0.1", "localhost", "page.localhost"):
        page = browser.new_page()
        page.goto(f"http://{host}:{other_port}/")
        answers = []
        for path, body in (
            ("/v1/models", None),
            ("/completion", '{"prompt": "Once", "n_predict": 1}'),
            ("/metrics", None),
        ):
            answers.append(page.evaluate(ASK, [server.url + path, body]))
        found[host] = [not answer.startswith("failed") for answer in answers]
        page.close()
    assert found == {
        "127.0.0.1": [True, True, False],
        "localhost": [True, True, False],
        "page.localhost": [False, False, False],
    }
