"""No body holds up the streams of others, neither the longest that is accepted nor one that is rejected."""

from __future__ import annotations

import functools
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from http_server import Server
from raw_http import RawConnection, post

from quire.protocol.messages import SAMPLING_LENGTHS, STRUCTURED_LENGTHS

PAUSE = 0.4
"""Seconds: several times what a body may hold others up, since other processes use the machine as well."""

ATTEMPTS = 10
MIB = 1 << 20
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
COMPLETION = "/completion"
ONE = {"prompt": "Once upon", "max_tokens": 1}
SHORT = {"prompt": "Once upon", "n_predict": 1}
VOCABULARY = list(range(2048))
USER = {"role": "user", "content": "a"}


def texts(name: str) -> list[str]:
    """Return as many and as long texts as a field may have."""
    most = SAMPLING_LENGTHS[name]
    assert most.total is not None
    return [f"{index:x}".rjust(most.total // most.most, "x") for index in range(most.most)]


def regex(number: int) -> str:
    """Return one of many regular expressions that take long to compile."""
    return "|".join(f"w{number}_{index}[a-z]{{0,50}}" for index in range(800))


ACCEPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "stop": (COMPLETIONS, {**ONE, "stop": texts("stop"), "n": 64}),
    "a stop of one text": (COMPLETIONS, {**ONE, "stop": "x" * (SAMPLING_LENGTHS["stop"].total or 0)}),
    "bad_words": (COMPLETIONS, {**ONE, "bad_words": texts("bad_words")}),
    "stop_token_ids": (COMPLETIONS, {**ONE, "stop_token_ids": VOCABULARY[100:101] * 4096}),
    "allowed_token_ids": (COMPLETIONS, {**ONE, "allowed_token_ids": VOCABULARY * 32}),
    "logit_bias": (COMPLETIONS, {**ONE, "logit_bias": dict.fromkeys(VOCABULARY, 1)}),
    "truncated prompt": (COMPLETIONS, {**ONE, "prompt": "tale " * (MIB // 5), "truncate_prompt_tokens": 8}),
    "choice": (COMPLETIONS, {**ONE, "structured_outputs": {"choice": [f"word {i}" for i in range(1000)]}}),
    "regex": (
        COMPLETIONS,
        {**ONE, "structured_outputs": {"regex": "|".join(f"w{i}[a-z]{{0,50}}" for i in range(900))}},
    ),
    "tokenize": ("/tokenize", {"prompt": "tale " * (MIB // 5)}),
    "combining characters": ("/tokenize", {"prompt": "\u0301" * (MIB // 2)}),
    "messages": ("/tokenize", {"messages": [USER] * 4096}),
    "detokenize": ("/detokenize", {"tokens": [69] * (1 << 18)}),
    "biases of texts": (COMPLETION, {**SHORT, "logit_bias": [["a", 0.5]] * 16_384}),
    "a prompt of token ids and texts": (COMPLETION, {**SHORT, "prompt": [0, "a", 69] * 670}),
}
REJECTED: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt": (COMPLETIONS, {**ONE, "prompt": "tale " * (7 * MIB // 5)}),
    "stop": (COMPLETIONS, {**ONE, "stop": "x" * 400_000}),
    "stops": (COMPLETIONS, {**ONE, "stop": ["xyz"] * 100_000}),
    "bad_words": (COMPLETIONS, {**ONE, "bad_words": [f"w{index}" for index in range(100_000)]}),
    "stop_token_ids": (COMPLETIONS, {**ONE, "stop_token_ids": list(range(400_000))}),
    "many values": (COMPLETIONS, {**ONE, "stop_token_ids": [1] * 2_000_000}),
    "many lists": (COMPLETIONS, {**ONE, "prompt": [[]] * 1_000_000}),
    "many messages": (CHAT, {"messages": [USER] * 8_000}),
    "whitespace_pattern": (
        COMPLETIONS,
        {**ONE, "structured_outputs": {"json_object": True, "whitespace_pattern": "x" * MIB}},
    ),
    "regex": (
        COMPLETIONS,
        {**ONE, "structured_outputs": {"regex": "x" * (STRUCTURED_LENGTHS["regex"].most + 1)}},
    ),
    "tokenize": ("/tokenize", {"prompt": "\u0301" * (3 * MIB)}),
    "detokenize": ("/detokenize", {"tokens": [69] * 400_000}),
    "many biases": (COMPLETION, {**SHORT, "logit_bias": [[1, 0.5]] * 30_000}),
    "a prompt of many texts": (COMPLETION, {**SHORT, "prompt": [0, *[""] * 500_000]}),
    "a prompt of many token ids": (COMPLETION, {**SHORT, "prompt": ["", *[0] * 500_000]}),
}


@contextmanager
def stream_beside(server: Server) -> Iterator[list[float]]:
    """Keep a stream running; the list has the time of each of its increments."""
    times: list[float] = []
    is_over = threading.Event()
    request = post(COMPLETIONS, {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True})

    def read() -> None:
        while not is_over.is_set():
            with RawConnection(server.url) as connection:
                lines = connection.send(request).begin_reply()
                while not is_over.is_set() and (line := lines.readline()):
                    assert b'"error"' not in line, line
                    if line.startswith(b"data"):
                        times.append(time.monotonic())

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            while len(times) < 10 and not reading.done():
                time.sleep(0.01)
            yield times
        finally:
            is_over.set()
            reading.result()


def longest_pause(server: Server, act: Callable[[], object]) -> float:
    """Act beside a stream; return the stream's longest pause from the begin until shortly after the end."""
    with stream_beside(server) as times:
        begin = time.monotonic()
        act()
        number = len(times)
        while len(times) == number:
            time.sleep(0.001)
        seen = [each for each in [*times] if each >= begin]
    return max(later - earlier for earlier, later in itertools.pairwise([begin, *seen]))


def check(server: Server, act: Callable[[int], object]) -> None:
    """Assert that one of several attempts, which are numbered, makes no pause of a stream."""
    pauses: list[float] = []
    while len(pauses) < ATTEMPTS and min(pauses, default=PAUSE) >= PAUSE:
        pauses.append(longest_pause(server, functools.partial(act, len(pauses))))
    assert min(pauses) < PAUSE, pauses


def send(server: Server, path: str, body: dict[str, Any], *statuses: int) -> Callable[[int], None]:
    """Return a function that sends a body, encoded here and now, and checks the status."""
    request = post(path, json.dumps(body, ensure_ascii=False).encode())

    def act(_attempt: int) -> None:
        with RawConnection(server.url) as connection:
            reply = connection.send(request).reply()
            assert reply.status in statuses, reply.body[:500]

    return act


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_longest_field_that_is_accepted_holds_nobody_up(server: Server, name: str) -> None:
    check(server, send(server, *ACCEPTED[name], 200))


@pytest.mark.parametrize("name", REJECTED)
def test_a_field_that_is_too_long_holds_nobody_up(server: Server, name: str) -> None:
    check(server, send(server, *REJECTED[name], 400, 413))


def test_sixteen_expensive_grammars_hold_nobody_up(server: Server) -> None:
    def act(attempt: int) -> None:
        bodies = [{**ONE, "structured_outputs": {"regex": regex(100 * attempt + number)}} for number in range(16)]
        with ThreadPoolExecutor(16) as pool:
            replies = list(pool.map(functools.partial(server.request, COMPLETIONS), bodies))
        assert {reply.status for reply in replies} == {200}

    check(server, act)


def test_four_long_prompts_at_once_hold_nobody_up(server: Server) -> None:
    tokenize = send(server, *ACCEPTED["tokenize"], 200)

    def act(_attempt: int) -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(tokenize, range(4)))

    check(server, act)
