"""Clients that disconnect or do not read: their requests end, and other requests are unaffected."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_watch import EngineWatch, halted, wait_until
from http_server import Server
from raw_http import RawConnection, post

from quire.protocol.messages import EventType, FinishReason, StepTrace

COMPLETIONS = "/v1/completions"
LONG: Any = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
STREAM: Any = {**LONG, "stream": True}
BEAMS: Any = {**LONG, "n": 8, "use_beam_search": True}  # takes all slots, and gives way to nobody
PROMPTS: Any = {"prompt": [[first, *range(1900)] for first in range(1, 65)], "max_tokens": 100}  # seconds of prefill
NEXT: Any = {"prompt": [1, 2, 3], "max_tokens": 1}  # no other prompt is as short
NUM_CONNECTIONS, AT_ONCE = 1000, 200
FEW = 16  # file descriptors and threads that a server may still open for processes that start after it
LIMITS = ["--max-num-seqs", "8", "--long-prefill-token-threshold", "2048", "--served-model-name", "m" * 4000]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Serve the demo model with few requests at once, prompts that fill a step, and a long name for large events."""
    with Server.start(*LIMITS) as server:
        yield server


@pytest.fixture
def watch(server: Server) -> Iterator[EngineWatch]:
    with EngineWatch(server) as watch:
        yield watch


def leave(server: Server, watch: EngineWatch, connection: RawConnection) -> list[StepTrace]:
    """Close a connection while the engine is halted, and send NEXT once the server has noticed.

    Return the steps until the engine has received NEXT, which the server sends after the abort.
    """

    def receives_next(step: StepTrace) -> bool:
        queued = [event for event in step.events if event.type is EventType.QUEUED]
        return any(event.num_prompt_tokens == len(NEXT["prompt"]) for event in queued)

    address = connection.address
    with contextlib.ExitStack() as stack:
        with halted(watch.pid):
            connection.close()
            wait_given_up(server, address)
            stack.enter_context(RawConnection(server.url).send(post(COMPLETIONS, NEXT)))
        return watch.until(receives_next)


def wait_given_up(server: Server, address: str) -> None:
    """Wait until the access log has the request as closed by the client."""
    wait_until(
        lambda: any(f"{address} " in line and " 499 in " in line for line in server.log),
        f"the server did not give up the request of {address}",
    )


def check_aborted(steps: list[StepTrace], number: int) -> int:
    """Check that a request is aborted before the last step, which no longer computes it; return its number of steps."""
    ends = [
        event for step in steps for event in step.events if (event.number, event.type) == (number, EventType.FINISHED)
    ]
    assert [event.finish_reason for event in ends] == [FinishReason.ABORT]
    its_steps = [step for step in steps if number in [sequence.number for sequence in step.sequences]]
    assert steps[-1] not in its_steps
    return len(its_steps)


def prefills(step: StepTrace) -> bool:
    return step.stats is not None and step.stats.prefill_tokens > 1000


def decodes(step: StepTrace) -> bool:
    return step.stats is not None and step.stats.decode_tokens > 0


@pytest.fixture
def prefilling(server: Server, watch: EngineWatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Have the engine compute prompts of another client, for seconds: so long does no other request end by itself."""
    body = {**PROMPTS, "max_tokens": 1, "cache_salt": request.node.name}
    with RawConnection(server.url).send(post(COMPLETIONS, body)):
        watch.until(prefills)
        yield


@pytest.mark.usefixtures("prefilling")
@pytest.mark.parametrize("body", [STREAM, LONG], ids=["streamed", "whole"])
def test_a_disconnect_during_decode_ends_the_request_within_a_step(
    server: Server, watch: EngineWatch, body: dict[str, Any]
) -> None:
    connection = RawConnection(server.url).send(post(COMPLETIONS, body))
    number = watch.until(decodes)[-1].sequences[0].number
    check_aborted(leave(server, watch, connection), number)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_disconnect_during_prefill_ends_the_request_within_a_step(
    server: Server, watch: EngineWatch, stream: bool
) -> None:
    body = {**PROMPTS, "stream": stream, "cache_salt": f"prefill {stream}"}
    connection = RawConnection(server.url).send(post(COMPLETIONS, body))
    steps = [*watch.until(prefills), *leave(server, watch, connection)]
    last = [step for step in steps if prefills(step)][-1]
    check_aborted(steps, last.sequences[-1].number)  # which would decode in the next step at the earliest


@pytest.mark.parametrize("body", [STREAM, LONG], ids=["streamed", "whole"])
def test_a_disconnect_in_the_queue_ends_the_request_before_its_first_step(
    server: Server, watch: EngineWatch, body: dict[str, Any]
) -> None:
    with contextlib.ExitStack() as others:
        for _ in range(8):  # for seconds each: a busy machine may be late to halt the engine
            others.enter_context(RawConnection(server.url).send(post(COMPLETIONS, BEAMS)))
            watch.event(EventType.QUEUED)
        connection = RawConnection(server.url).send(post(COMPLETIONS, body))
        number = watch.event(EventType.QUEUED).number
        assert check_aborted(leave(server, watch, connection), number) == 0


@pytest.mark.usefixtures("prefilling")
def test_the_disconnect_of_a_client_that_pipelined_a_request_is_noticed(server: Server, watch: EngineWatch) -> None:
    connection = RawConnection(server.url).send(post(COMPLETIONS, STREAM) + post(COMPLETIONS, STREAM))
    number = watch.until(decodes)[-1].sequences[0].number
    check_aborted(leave(server, watch, connection), number)


def test_a_client_that_reads_nothing_costs_no_memory_and_is_dropped() -> None:
    with Server.start(*LIMITS, "--send-timeout", "1") as server, RawConnection(server.url) as connection:
        assert server.request(COMPLETIONS, {**LONG, "max_tokens": 1}).status == 200
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        before = resident_bytes(server)
        with EngineWatch(server) as watch:
            connection.send(post(COMPLETIONS, {**STREAM, "n": 7}))  # some 40 MB, of which the system buffers 5
            watch.decode()
        assert server.request(COMPLETIONS, {**LONG, "max_tokens": 1}).status == 200  # others continue
        wait_given_up(server, connection.address)
        assert resident_bytes(server) - before < 8 << 20


def test_a_thousand_dropped_streams_leave_nothing_behind(server: Server) -> None:
    server.request(COMPLETIONS, {**LONG, "max_tokens": 1})
    most_files, most_threads = (count(server, what) + FEW for what in ("fd", "task"))
    for _ in range(NUM_CONNECTIONS // AT_ONCE):
        connections = [RawConnection(server.url).send(post(COMPLETIONS, STREAM)) for _ in range(AT_ONCE)]
        for connection in connections:
            assert connection.socket.recv(12) == b"HTTP/1.1 200"
            connection.close()
    wait_until(lambda: count(server, "fd") <= most_files, "file descriptors are left")
    assert count(server, "task") <= most_threads
    server.check_pages()


def count(server: Server, what: str) -> int:
    """Return the number of file descriptors ("fd") or threads ("task") of the server."""
    return len(os.listdir(f"/proc/{server.process.pid}/{what}"))


def resident_bytes(server: Server) -> int:
    """Return the resident memory of the server's process."""
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
