"""The prefix cache and API keys: what one key has sent shortens no prompt of another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from http_server import Server
from patience import PATIENCE

from quire.frontend.client.engine_client import CoreClient
from quire.frontend.http.transport.auth import ApiKeys

TALE = "Once upon a time there was a girl who had a red ball and a dog. " * 6
CHAT: Any = [{"role": "user", "content": TALE}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": f"one {TALE}", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "system", "content": "two"}, *CHAT], "max_tokens": 1},
    "/v1/responses": {"input": CHAT, "instructions": "three", "max_output_tokens": 1},
    "/v1/messages": {"messages": CHAT, "system": "four", "max_tokens": 1},
    "/api/generate": {"prompt": f"five {TALE}", "raw": True, "stream": False, "options": {"num_predict": 1}},
    "/api/chat": {"messages": [{"role": "system", "content": "six"}, *CHAT], "stream": False},
    "/completion": {"prompt": f"seven {TALE}", "n_predict": 1},
    "/v1/embeddings": {"input": f"eight {TALE}"},
    "/api/embed": {"input": f"nine {TALE}"},
}
SALTED = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"]
"""Paths whose bodies may have a `cache_salt`."""

Cached = Callable[[Server, str, str, dict[str, Any]], int]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server.start("--api-key", "one", "--api-key", "two") as server:
        yield server


@pytest.fixture(scope="module")
def cached(server: Server) -> Iterator[Cached]:
    """A request of a key at a server of the engine; returns how many tokens came from the prefix cache."""
    client = CoreClient(server.engine_address, lambda _: None)

    def total() -> int:
        return int(client.call("stats").result(PATIENCE)["totals"]["cached_tokens"])

    def send(server: Server, key: str, path: str, body: dict[str, Any]) -> int:
        before = total()
        reply = server.request(path, {"model": "quire-demo", **body}, headers={"Authorization": f"Bearer {key}"})
        assert reply.status == 200, reply
        return total() - before

    try:
        yield send
    finally:
        client.close()


@pytest.mark.parametrize("path", BODIES)
def test_a_key_finds_nothing_of_another_in_the_prefix_cache(server: Server, cached: Cached, path: str) -> None:
    body = BODIES[path]
    assert cached(server, "one", path, body) == 0
    assert cached(server, "one", path, body) >= 32
    assert cached(server, "two", path, body) == 0
    if path in SALTED:
        salted = {**body, "cache_salt": "mine"}
        assert cached(server, "one", path, salted) == 0
        assert cached(server, "two", path, salted) == 0
        assert cached(server, "one", path, salted) >= 32


def test_keys_share_the_prefix_cache_if_the_server_lets_them(server: Server, cached: Cached) -> None:
    keys = ["--api-key", "one", "--api-key", "two"]
    with Server.start("--engine-address", server.engine_address, "--share-prefix-cache", *keys) as other:
        body = {"prompt": f"ten {TALE}", "max_tokens": 1}
        assert cached(other, "one", "/v1/completions", body) == 0
        assert cached(other, "two", "/v1/completions", body) >= 32


def test_a_salt_of_the_length_that_the_engine_allows_is_the_longest(server: Server) -> None:
    headers = {"Authorization": "Bearer one"}
    for length, status in ((1024, 200), (1025, 400)):
        body = {"prompt": "Once", "max_tokens": 1, "cache_salt": "é" * length}
        assert server.request("/v1/completions", body, headers=headers).status == status


def test_the_salts_of_a_key_are_the_same_in_every_server_and_are_not_shown() -> None:
    from starlette.datastructures import Headers

    def caller(*keys: str, share_prefix_cache: bool = False) -> Any:
        return ApiKeys(keys, share_prefix_cache=share_prefix_cache).check(
            "/v1/models", Headers({"x-api-key": "secret"}), {}
        )

    salts = {caller("secret").cache_salt("x"), caller("other", "secret").cache_salt("x")}
    assert len(salts) == 1
    assert caller("secret").cache_salt("") not in salts
    assert caller("secret", share_prefix_cache=True).cache_salt("x") == "x"
    assert "secret" not in repr(caller("secret"))
