"""API keys, limits, proxies and TLS."""

from __future__ import annotations

import socket
import ssl
import subprocess
import time
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any, cast

import pytest
from engine_watch import EngineWatch
from http_app import models_of
from http_server import Reply, Server, events_of
from openai import AuthenticationError, OpenAI, RateLimitError
from patience import PATIENCE
from raw_http import RawConnection, post

from quire.frontend import AsyncLLM
from quire.frontend.cli.secret_flags import secrets_in
from quire.frontend.client.observer import OpenRequest
from quire.frontend.http.args import ServerArgs
from quire.frontend.http.routes import routes
from quire.frontend.http.service import RetryAfter
from quire.frontend.http.transport.auth import OPEN_PATHS

COMPLETIONS = "/v1/completions"
GOOD = {"prompt": "Once upon", "max_tokens": 1}
STREAM: Any = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True}
KEYS = ["sk-flag", "sk-file-1", "sk-file-2", "sk-variable-1", "sk-variable-2"]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server with keys from all sources, behind a proxy, that web pages of one origin may call."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# two\nsk-file-1\n\n  sk-file-2  \n")
    flags = ["--api-key", "sk-flag", "--api-key-file", str(file), "--root-path", "/quire"]
    environment = {"QUIRE_API_KEY": "sk-variable-1, sk-variable-2"}
    with Server.start(*flags, "--allowed-origins", "http://page.test", environment=environment) as server:
        assert server.url.endswith("/quire")
        server.url = server.url.removesuffix("/quire")  # as the proxy does
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_key_is_accepted_in_every_form(locked: Server) -> None:
    for key in KEYS:
        basic = b64encode(f"anyone:{key}".encode()).decode()
        for headers in (
            bearer(key),
            {"authorization": f"bearer  {key}"},
            {"x-api-key": key},
            {"Authorization": f"Basic {basic}"},
        ):
            assert locked.request(COMPLETIONS, GOOD, headers=headers).status == 200


@pytest.mark.parametrize(
    "headers",
    [{}, bearer(""), bearer("sk-fla"), bearer("sk-flagg"), bearer("sk-flag,sk-file-1"), bearer("# two"), bearer("\xff"),
     {"Authorization": "sk-flag"}, {"Authorization": "Basic sk-flag"}, {"Authorization": "Basic ////"},
     {"x-api-key": "sk"}, {"Cookie": "key=sk-flag"}],
    ids=str,
)  # fmt: skip
def test_a_request_without_a_valid_key_is_unauthorized(locked: Server, headers: dict[str, str]) -> None:
    reply = locked.request(COMPLETIONS, GOOD, headers=headers)
    assert (reply.status, reply.error["type"], reply.error["code"]) == (401, "authentication_error", "invalid_api_key")
    assert "WWW-Authenticate".lower() in reply.headers


def test_every_route_but_probes_requires_a_key(locked: Server) -> None:
    with_engine = AsyncLLM(engine_address=locked.engine_address)
    try:
        known = routes(models_of(with_engine))
    finally:
        with_engine.close()
    paths = {route.path.replace("{name:path}", "x") for route in known} | {"/nothing", "/health/", "//health"}
    for path in paths - set(OPEN_PATHS):
        for method in ("GET", "POST", "HEAD", "OPTIONS"):
            assert locked.request(path, method=method).status == 401, (method, path)
    assert [locked.request(path).status for path in OPEN_PATHS] == [200] * 3


def test_openais_client_raises_an_authentication_error_and_no_key_is_logged(locked: Server) -> None:
    client = OpenAI(base_url=f"{locked.url}/v1", api_key="sk-wrong", max_retries=0)
    with client, pytest.raises(AuthenticationError):
        client.models.list()
    assert locked.request("/version?api_key=sk-flag", headers=bearer("sk-flag")).status == 200
    assert not [line for line in locked.log if "sk-" in line]


def test_only_pages_of_an_allowed_origin_may_call(locked: Server) -> None:
    origin = {"Origin": "http://page.test", "Access-Control-Request-Method": "POST"}
    preflight = locked.request(COMPLETIONS, method="OPTIONS", headers=origin)
    assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (200, "http://page.test")
    reply = locked.request(COMPLETIONS, GOOD, headers={**bearer("sk-flag"), "Origin": "http://page.test"})
    assert reply.headers["access-control-allow-origin"] == "http://page.test"
    assert "x-request-id" in reply.headers["access-control-expose-headers"].lower()
    refused = locked.request(COMPLETIONS, GOOD, headers=origin)  # the page can read the error
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "http://page.test")
    stranger = locked.request(COMPLETIONS, method="OPTIONS", headers={**origin, "Origin": "http://other.test"})
    assert (stranger.status, "--allowed-origins" in stranger.error["message"]) == (400, True)
    assert "access-control-allow-origin" not in stranger.headers
    ids = [each.headers["x-request-id"] for each in (preflight, refused, stranger)]
    deadline = time.monotonic() + PATIENCE
    while not all(any(line.endswith(f"request {each}\n") for line in list(locked.log)) for each in ids):
        assert time.monotonic() < deadline, locked.log[-5:]
    other = locked.request(COMPLETIONS, GOOD, headers={**bearer("sk-flag"), "Origin": "http://other.test"})
    assert "access-control-allow-origin" not in other.headers


def test_pages_and_their_document_work_below_a_root_path(locked: Server) -> None:
    document = locked.request("/openapi.json", headers=bearer("sk-flag")).json()
    assert document["servers"] == [{"url": "/quire"}]
    for path in ("/", "/docs"):
        page = locked.request(path, headers=bearer("sk-flag")).body.decode()
        assert 'href="/' not in page
        assert 'src="/' not in page


@pytest.fixture(scope="module")
def narrow() -> Iterator[Server]:
    """Start a server that runs one request at a time, and lets one wait."""
    with Server.start("--max-num-seqs", "1", "--max-waiting-requests", "1") as server:
        yield server


@pytest.fixture
def busy(narrow: Server) -> Iterator[EngineWatch]:
    """Watch the server's engine, which is busy with one request until the end of the test."""
    with EngineWatch(narrow) as watch, RawConnection(narrow.url).send(post(COMPLETIONS, STREAM)):
        watch.wait_for(running=1)
        yield watch


def test_a_full_queue_answers_429_with_retry_after(narrow: Server, busy: EngineWatch) -> None:
    with RawConnection(narrow.url).send(post(COMPLETIONS, STREAM)):
        busy.wait_for(waiting=1)
        for body in (GOOD, {**GOOD, "stream": True}):
            reply = narrow.request(COMPLETIONS, body)
            assert (reply.status, reply.error["type"], reply.error["code"]) == (429, "rate_limit_error", "overloaded")
            assert 1 <= int(reply.headers["retry-after"]) <= 60
        client = OpenAI(base_url=f"{narrow.url}/v1", api_key="none", max_retries=0)
        with client, pytest.raises(RateLimitError):
            client.completions.create(model="quire-demo", prompt="x")


def test_retry_after_follows_the_rate_of_finished_requests() -> None:
    now = 0.0
    retry_after = RetryAfter(lambda: now)
    request = cast("OpenRequest", type("Request", (), {"error": None})())
    assert retry_after.seconds == 1
    for _ in range(200):
        retry_after.on_submitted(request)
    now = 0.2
    assert retry_after.seconds == 40  # none has finished in 0.2 s
    for _ in range(100):
        now += 0.1
        retry_after.on_finished(request, now)
    assert retry_after.seconds == 10  # ten finish per second, and a hundred are open
    for _ in range(100):
        retry_after.on_finished(request, now)
    now = 1000.0
    retry_after.on_submitted(request)
    assert retry_after.seconds == 1  # the rate before the idle time is forgotten


def test_a_time_limit_before_the_first_token_is_504(narrow: Server, busy: EngineWatch) -> None:
    del busy
    for stream in (False, True):
        body = {**GOOD, "stream": stream}
        reply = narrow.request(COMPLETIONS, body, headers={"X-Request-Timeout": "0.02"})
        assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_later_time_limit_ends_the_answer(locked: Server, stream: bool) -> None:
    def ask(seconds: int) -> Reply:
        headers = {"X-Request-Timeout": str(seconds), **bearer("sk-flag")}
        return locked.request(COMPLETIONS, {**STREAM, "n": 64, "stream": stream}, headers=headers)

    seconds = 1
    while (reply := ask(seconds)).status == 504:  # a busy machine has no token by then
        seconds *= 2
    answers = events_of(reply.body)[:-1] if stream else [reply.json()]
    ends = {(choice["finish_reason"], choice.get("stop_reason")) for answer in answers for choice in answer["choices"]}
    assert ("length", "timeout") in ends


def test_request_ids_are_returned(narrow: Server) -> None:
    reply = narrow.request("/version", headers={"X-Request-Id": "mine"})
    assert reply.headers["x-request-id"] == "mine"
    ids = {narrow.request("/version").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


def test_tls_from_files(tmp_path: Path) -> None:
    if which("openssl") is None:
        pytest.skip("openssl is not installed, which makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    with Server.start("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)) as server:
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(certificate))
        with urllib.request.urlopen(f"{server.url}/health", context=trusting, timeout=PATIENCE) as reply:
            assert reply.status == 200
        host, port = server.url.removeprefix("https://").split(":")
        with socket.create_connection((host, int(port)), 20) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert plain.recv(100) == b""  # no response without TLS


def test_keys_on_the_command_line_are_hidden_from_other_users(locked: Server) -> None:
    arguments = Path(f"/proc/{locked.process.pid}/cmdline").read_bytes().split(b"\0")
    assert b"serve" in arguments
    assert arguments[arguments.index(b"--api-key") + 1] == b"*" * len("sk-flag")
    assert b"--root-path" in arguments


def test_secrets_are_found_in_both_forms_of_a_flag() -> None:
    arguments = [b"quire", b"serve", b"--api-key", b"one", b"--api-key=two", b"--api-key-file", b"keys", b"--api-key"]
    line = b"\0".join(arguments)
    assert [line[place : place + length] for place, length in secrets_in(arguments)] == [b"one", b"two"]


def test_an_empty_key_does_not_open_the_server() -> None:
    with pytest.raises(ValueError, match="an API key is empty"):
        ServerArgs(api_key=("",)).all_api_keys()
