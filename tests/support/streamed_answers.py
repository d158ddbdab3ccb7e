"""Seeded completions that are streamed from a server, each to its end, and what engines have left of them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, NamedTuple

from engine_process import DealerClient
from http_server import Server
from patience import PATIENCE

SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95}]
"""Greedy, and sampled with a seed."""

_THREADS = 64


class Answer(NamedTuple):
    """An answer; one that is whole has one finish reason, then one `[DONE]`."""

    tokens: list[int]
    logprobs: list[float]
    ends: list[str]


class Streams:
    """Streams of one server, all at once; `begun` of each is set by its first token."""

    def __init__(self, server: Server, count: int, max_tokens: int) -> None:
        self._url = server.url
        self._threads = ThreadPoolExecutor(_THREADS)
        self.begun = [Event() for _ in range(count)]
        self._answers = [self._threads.submit(self._one, number, max_tokens) for number in range(count)]

    def wait_begun(self, count: int) -> None:
        """Wait for the first token of the first so many."""
        for event in self.begun[:count]:
            assert event.wait(PATIENCE)

    def answers(self) -> list[Answer]:
        """Return all answers once they have ended. Raises what the connection of one has raised."""
        return [answer.result(PATIENCE) for answer in self._answers]

    def errors(self) -> list[BaseException | None]:
        """Return for each the error with which its connection ended."""
        return [answer.exception(PATIENCE) for answer in self._answers]

    def _one(self, number: int, max_tokens: int) -> Answer:
        body = {
            "prompt": [300 + number, 17, 23], "max_tokens": max_tokens, "ignore_eos": True, "seed": number,
            "logprobs": 1, "return_token_ids": True, "stream": True, **SAMPLINGS[number % len(SAMPLINGS)],
        }  # fmt: skip
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/v1/completions", json.dumps(body).encode(), headers)
        answer = Answer([], [], [])
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            for line in reply:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    answer.ends.append("[DONE]")
                    continue
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                (choice,) = chunk["choices"]
                answer.tokens.extend(choice["token_ids"])
                answer.logprobs.extend((choice["logprobs"] or {}).get("token_logprobs", []))
                answer.ends.extend([choice["finish_reason"]] if choice["finish_reason"] else [])
                self.begun[number].set()
        if answer.ends[-1:] != ["[DONE]"]:  # which http.client does not tell
            raise ConnectionError(f"the stream was cut off after {len(answer.tokens)} tokens")
        return answer


def answers(server: Server, count: int, max_tokens: int) -> list[Answer]:
    """Stream so many answers together."""
    return Streams(server, count, max_tokens).answers()


def attached(addresses: Sequence[str]) -> list[str]:
    """Return the flags of a server that uses running engines."""
    return [flag for address in addresses for flag in ("--engine", address)]


def wait_until_at_rest(addresses: Sequence[str]) -> list[dict[str, Any]]:
    """Return the statistics of each engine once nothing runs or waits in it; every page must be accounted for."""
    found = []
    for address in addresses:
        with DealerClient(address) as client:
            found.append(client.wait_until_at_rest())
    return found
