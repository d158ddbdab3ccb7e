"""Servers that are killed: engines release what they had, other servers go on, and clients know what they have got."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
from engine_process import DealerClient, EngineUnderTest
from engine_watch import EngineWatch
from http_server import Server
from patience import PATIENCE
from streamed_answers import Streams, answers, attached, wait_until_at_rest

from quire.protocol.messages import EventType

if TYPE_CHECKING:
    import openai
else:
    openai = pytest.importorskip("openai")

LONG = 1500  # tokens of answers that are cut off
SHORT = 400  # of those that are not
NUM_LOST, NUM_OTHERS = 40, 4
SLOTS = 4  # of each engine, so that requests wait


@contextmanager
def two_engines(model: Path) -> Iterator[list[str]]:
    """Two engines that nobody owns; yield their addresses."""
    flags = ["--threads", "1", "--max-num-seqs", str(SLOTS)]
    with EngineUnderTest(model, *flags) as one, EngineUnderTest(model, *flags) as other:
        yield [one.address, other.address]


def wait_until_busy(address: str) -> None:
    """Wait until requests run in an engine, and others wait."""
    with DealerClient(address) as client:

        def is_busy() -> bool:
            stats = client.call("stats")
            return bool(stats["running"] and stats["waiting"])

        client.until(is_busy)


def test_engines_release_what_a_killed_server_had_and_serve_others(demo_model: Path) -> None:
    with two_engines(demo_model) as addresses:
        with Server.start(*attached(addresses)) as beside:
            expected = answers(beside, NUM_OTHERS, SHORT)
            before = [stats["totals"]["decode_tokens"] for stats in wait_until_at_rest(addresses)]
            assert all(before)
            with Server.start(*attached(addresses)) as first:
                others = Streams(beside, NUM_OTHERS, SHORT)
                others.wait_begun(NUM_OTHERS)
                lost = Streams(first, NUM_LOST, LONG)
                lost.wait_begun(1)
                for address in addresses:
                    wait_until_busy(address)
                first.stop(signal.SIGKILL)
            assert any(lost.errors())
            assert others.answers() == expected
            after = [stats["totals"]["decode_tokens"] for stats in wait_until_at_rest(addresses)]
            num_decoded = sum(after) - sum(before) - sum(before)
            assert num_decoded < NUM_LOST * LONG // 2  # they have not run to their ends
            assert answers(beside, NUM_OTHERS, SHORT) == expected
        with Server.start(*attached(addresses)) as next_one:
            assert answers(next_one, NUM_OTHERS, SHORT) == expected
        wait_until_at_rest(addresses)


class Restarted:
    """A server that is started again on its port whenever it dies, as `scripts/deploy/quire.service` has it."""

    def __init__(self, *flags: str) -> None:
        self._flags = flags
        self.server = Server.start(*flags)
        self.url = self.server.url
        self._lock = threading.Lock()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self.server.process.wait()
            with self._lock:
                if self._is_ending:
                    return
                self.server = Server.start(*self._flags, "--port", self.url.rpartition(":")[2])

    def kill(self) -> None:
        """Kill the server that is there."""
        with self._lock:
            self.server.process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        with self._lock:
            self._is_ending = True
            self.server.stop()
        self._thread.join(PATIENCE)


REQUEST: dict[str, Any] = {
    "model": "quire-demo", "prompt": "Once upon a time", "max_tokens": LONG, "temperature": 0.9, "seed": 5,
    "extra_body": {"ignore_eos": True},
}  # fmt: skip


def client_of(server: Restarted) -> openai.OpenAI:
    """Return a client that waits longer than a server takes to start: by default it gives up after about 2 s."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=100, timeout=PATIENCE)


@pytest.fixture
def restarted() -> Iterator[Restarted]:
    with Restarted("--num-pages", "256", "--threads", "1") as server:
        yield server


def test_openai_retries_what_a_killed_server_has_not_answered(restarted: Restarted) -> None:
    with client_of(restarted) as client:

        def ask() -> str:
            return str(client.completions.create(**REQUEST).choices[0].text)

        expected = ask()
        found: list[str] = []
        with EngineWatch(restarted.server) as watch:
            thread = threading.Thread(target=lambda: found.append(ask()))
            thread.start()
            watch.event(EventType.SCHEDULED)
            restarted.kill()
        thread.join(PATIENCE)
        assert found == [expected]
        restarted.kill()
        assert ask() == expected  # which finds nobody first, or a connection that is gone


def test_openai_never_takes_a_stream_that_a_kill_cuts_off_for_whole(restarted: Restarted) -> None:
    with client_of(restarted) as client:

        def ask(*, is_killed: bool = False) -> tuple[str, type[Exception] | None]:
            """Return the text that has come, and the kind of the error that ended it."""
            text = ""
            try:
                for chunk in client.completions.create(**REQUEST, stream=True):
                    text += chunk.choices[0].text
                    if is_killed:
                        is_killed = False
                        restarted.kill()
            except openai.OpenAIError as error:
                return text, type(error)
            return text, None

        expected, error = ask()
        assert error is None
        while True:
            text, error = ask(is_killed=True)
            if error is not None:
                break
            assert text == expected  # it had come before the kill
        assert error is openai.APIConnectionError
        assert expected.startswith(text)
        assert ask() == (expected, None)
