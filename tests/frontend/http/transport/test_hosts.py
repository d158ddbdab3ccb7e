"""Pages whose domain was made to resolve to this machine cannot use a server that listens on a loopback address."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from http_server import Server
from raw_http import RawConnection
from starlette.datastructures import Headers

from quire.frontend.http.args import ServerArgs
from quire.frontend.http.errors import ApiError
from quire.frontend.http.transport.hosts import AllowedHosts

LOCAL = ["localhost", "LOCALHOST:80", "localhost.", "app.localhost:80", "127.0.0.1:1", "[::1]", "[::1]:80", "10.1.2.3"]
FOREIGN = ["evil.example", "localhost.evil.example:80", "evil-localhost", "127.0.0.1.evil.example", "", "a:b:c", "[x]"]


def allowed(hosts: list[str], **args: Any) -> list[str]:
    """Return those of the values of Host by which a server may be addressed."""
    check = AllowedHosts(ServerArgs(**args)).check
    found = []
    for host in hosts:
        with suppress(ApiError):
            check(Headers({"host": host}))
            found.append(host)
    return found


@pytest.mark.parametrize("listening", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_a_loopback_address_answers_to_local_names_only(listening: str) -> None:
    local = [*LOCAL, f"[{listening}]" if ":" in listening else listening]
    assert allowed([*local, *FOREIGN], host=listening) == local
    AllowedHosts(ServerArgs(host=listening)).check(Headers({}))  # HTTP/1.0 without one


@pytest.mark.parametrize("listening", ["127.0.0.1", "0.0.0.0"])
def test_further_names_can_be_allowed(listening: str) -> None:
    names = ("llm.example", "*.corp.example")
    good, bad = (
        [*LOCAL, "LLM.example:1", "a.b.corp.example"],
        [*FOREIGN, "corp.example", "xllm.example", "xcorp.example"],
    )
    assert allowed([*good, *bad], host=listening, allowed_hosts=names) == good
    assert allowed(bad, host=listening, allowed_hosts=("*",)) == bad


def test_other_addresses_and_unix_sockets_answer_to_every_name() -> None:
    assert allowed(FOREIGN, host="0.0.0.0") == FOREIGN
    assert allowed(FOREIGN, uds="/run/quire.sock") == FOREIGN


@pytest.mark.parametrize("name", ["http://llm.example", "llm.example:80", "*example", ""])
def test_a_name_with_more_than_a_host_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="is not a host name; give one without scheme and port"):
        ServerArgs(allowed_hosts=(name,))


@pytest.mark.parametrize(
    "path", ["/", "/health", "/metrics", "/view/events", "/v1/models", "/page/chat.js", "/nothing"]
)
def test_no_route_answers_to_a_foreign_name(server: Server, path: str) -> None:
    with RawConnection(server.url) as connection:
        request = f"GET {path} HTTP/1.1\r\nHost: {{}}\r\nConnection: close\r\n\r\n"
        reply = connection.send(request.format("evil.example:8000").encode()).reply()
        assert (reply.status, reply.error["code"]) == (421, "host_not_allowed")
        assert reply.error["message"] == (
            "the header Host is 'evil.example:8000', by which this server may not be addressed; use localhost, an IP "
            "address, or start the server with --allowed-hosts NAME"
        )
        two = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    with RawConnection(server.url) as connection:
        assert connection.send(two.encode()).reply().status == 421
