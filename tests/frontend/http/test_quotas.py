"""Quotas and fair shares of API keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, cast

import pytest
from engine_watch import EngineWatch
from http_server import Server
from raw_http import RawConnection, post

from quire.frontend.client.observer import OpenRequest, RequestOptions
from quire.frontend.http.args import ServerArgs
from quire.frontend.http.errors import ApiError
from quire.frontend.http.quotas import Quotas
from quire.frontend.text.prompts import Prompt
from quire.protocol.messages import EventType, RequestEvent

COMPLETIONS = "/v1/completions"
STREAM: Any = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def open_request(tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> OpenRequest:
    fields = {
        "options": RequestOptions(tenant=tenant),
        "prompt": Prompt([1] * num_prompt_tokens),
        "num_output_tokens": num_output_tokens,
    }
    return cast("OpenRequest", type("Request", (), fields)())


def rejection(quotas: Quotas, tenant: str) -> ApiError | None:
    try:
        with quotas.admit(tenant, lambda: 7):
            return None
    except ApiError as error:
        return error


def test_the_tokens_of_a_minute_come_back_at_an_even_rate() -> None:
    now = 100.0
    quotas = Quotas(None, 600, lambda: now)
    request = open_request("one", 100, 650)
    quotas.on_submitted(request)
    assert rejection(quotas, "one") is None
    quotas.on_finished(request, now)  # 150 tokens more than there are
    error = rejection(quotas, "one")
    assert error is not None
    assert (error.status, error.code, error.headers) == (429, "rate_limit_exceeded", {"Retry-After": "16"})
    assert "used up its 600 tokens per minute; try again in 16 s" in error.message
    assert rejection(quotas, "two") is None
    now += 16.0
    assert rejection(quotas, "one") is None
    now += 1000.0
    quotas.on_submitted(open_request("one", 600, 0))  # no more than those of a minute have gathered
    assert rejection(quotas, "one") is not None


def test_a_request_counts_until_it_has_ended() -> None:
    quotas = Quotas(2, None)
    with quotas.admit("one", lambda: 7):
        assert rejection(quotas, "one") is None
        with quotas.admit("one", lambda: 7):
            error = rejection(quotas, "one")
            assert error is not None
            assert (error.status, error.headers) == (429, {"Retry-After": "7"})
            assert rejection(quotas, "two") is None
        assert rejection(quotas, "one") is None


def test_quotas_need_keys() -> None:
    with pytest.raises(ValueError, match="max_requests_per_key=3 is a quota of API keys, and there are none"):
        ServerArgs(max_requests_per_key=3).all_api_keys()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Start a server that runs one request at a time, for three keys."""
    keys = [argument for key in ("one", "two", "three") for argument in ("--api-key", key)]
    quotas = ["--max-requests-per-key", "8", "--max-tokens-per-minute-per-key", "100"]
    with Server.start("--max-num-seqs", "1", *keys, *quotas) as server:
        yield server


def test_a_key_with_many_requests_lets_another_go_first(server: Server) -> None:
    with EngineWatch(server) as watch, ExitStack() as stack:
        events: list[RequestEvent] = []

        def ask(key: str, max_tokens: int) -> None:
            body, num_before = {**STREAM, "max_tokens": max_tokens}, numbers_of(EventType.QUEUED)
            connection = stack.enter_context(RawConnection(server.url))
            connection.send(post(COMPLETIONS, body, f"Authorization: Bearer {key}"))
            while numbers_of(EventType.QUEUED) == num_before:
                look()

        def look() -> None:
            events.extend(event for step in watch.until(lambda _: True) for event in step.events)

        def numbers_of(kind: EventType) -> list[int]:
            return [event.number for event in events if event.type is kind]

        for _ in range(8):
            ask("one", 1500)
        reply = server.request(COMPLETIONS, STREAM, headers=bearer("one"))
        assert (reply.status, reply.error["type"], reply.error["code"]) == (
            429, "rate_limit_error", "rate_limit_exceeded",
        )  # fmt: skip
        assert "8 requests of this API key are open" in reply.error["message"]
        assert int(reply.headers["retry-after"]) >= 1
        assert server.request("/v1/models", headers=bearer("one")).status == 200
        ask("two", 4)
        alone, num_started = numbers_of(EventType.QUEUED)[-1], len(numbers_of(EventType.SCHEDULED))
        while alone not in numbers_of(EventType.SCHEDULED):
            look()
        assert numbers_of(EventType.SCHEDULED).index(alone) <= num_started + 1


def test_a_key_that_has_used_up_its_tokens_must_wait(server: Server) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 150, "ignore_eos": True}
    assert server.request(COMPLETIONS, body, headers=bearer("three")).status == 200
    for path, payload in ((COMPLETIONS, body), ("/v1/messages", {"max_tokens": 1, "messages": []})):
        reply = server.request(path, payload, headers={"x-api-key": "three"})
        assert reply.status == 429
        assert "used up its 100 tokens per minute" in reply.json()["error"]["message"]
        assert 1 <= int(reply.headers["retry-after"]) <= 60
    assert server.request(COMPLETIONS, {**body, "max_tokens": 1}, headers=bearer("two")).status == 200


def test_without_quotas_a_key_has_no_limit(server: Server) -> None:
    del server
    quotas = Quotas(None, None)
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(quotas.admit("one", lambda: 1))
        quotas.on_submitted(open_request("one", 1 << 20, 0))
        assert rejection(quotas, "one") is None
