"""The end of the server: by signals and by its engine's death, with nothing left behind."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from engine_watch import EngineWatch, engine_pid, halted, wait_until
from http_server import Server, events_of
from patience import PATIENCE
from raw_http import RawConnection, post

COMPLETIONS = "/v1/completions"
STREAM: Any = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True}
CROWD: Any = {**STREAM, "stream": False, "n": 128}  # makes all steps long, so that no stream ends by itself


def streaming(server: Server, **fields: Any) -> http.client.HTTPResponse:
    """Begin a stream and return its response."""
    return RawConnection(server.url).send(post(COMPLETIONS, {**STREAM, **fields})).begin_reply()


def crowd(server: Server) -> RawConnection:
    """Send CROWD, and wait until the engine computes all of it."""
    with EngineWatch(server) as watch:
        connection = RawConnection(server.url).send(post(COMPLETIONS, CROWD))
        watch.until(lambda step: step.stats is not None and step.stats.decode_tokens == CROWD["n"])
        return connection


def test_sigterm_drains_streams_and_rejects_new_requests() -> None:
    with Server.start("--shutdown-timeout", str(PATIENCE), "--keep-alive", str(PATIENCE)) as server:
        assert server.request("/ready").status == 200
        pid = engine_pid(server)
        stream = streaming(server, n=4, max_tokens=1900)
        with halted(pid):  # the stream outlasts all that follows
            server.process.send_signal(signal.SIGTERM)
            wait_until(
                lambda: server.request("/ready").status == 503, "the server does not report that it is shutting down"
            )
            for path, body in (("/health", None), ("/ready", None), (COMPLETIONS, {"prompt": "x"})):
                refused = server.request(path, body)  # on a new connection: the server still listens
                assert (refused.status, refused.error["code"]) == (503, "shutting_down")
                assert "shutting down" in refused.error["message"]
                assert int(refused.headers["retry-after"]) >= 1
            assert server.request("/version").status == 200
        *events, done = events_of(stream.read())
        assert done == "[DONE]"
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(PATIENCE) == 128 + signal.SIGTERM


def test_requests_beyond_the_drain_limit_get_an_error() -> None:
    with Server.start("--shutdown-timeout", "0.2") as server:
        pid = engine_pid(server)
        whole, stream = crowd(server), streaming(server)
        server.process.send_signal(signal.SIGTERM)
        *_, error, done = events_of(stream.read())
        assert (error["error"]["code"], done) == ("shutting_down", "[DONE]")
        reply = whole.reply()
        assert (reply.status, reply.error["code"]) == (503, "shutting_down")
        assert server.process.wait(PATIENCE) == 128 + signal.SIGTERM
        assert not Path(f"/proc/{pid}").exists()


def test_sigint_ends_the_server_at_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))  # as a killed server leaves it
    with Server.start("--uds", str(path)) as server:
        pid = engine_pid(server)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(post(COMPLETIONS, {**STREAM, "n": 16}))
            reply = http.client.HTTPResponse(client)
            reply.begin()
            server.process.send_signal(signal.SIGINT)
            assert events_of(reply.read())[-2]["error"]["code"] == "shutting_down"
        assert server.process.wait(PATIENCE) == 128 + signal.SIGINT
        assert not path.exists()
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(("number", "report"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "Fatal Python error")])
def test_requests_get_an_error_and_the_server_ends_when_the_engine_dies(number: signal.Signals, report: str) -> None:
    with Server.start("--max-restarts", "0") as server:
        whole, stream = crowd(server), streaming(server)
        os.kill(engine_pid(server), number)
        *_, error, done = events_of(stream.read())
        assert (error["error"]["code"], error["error"]["type"], done) == ("engine_dead", "server_error", "[DONE]")
        reply = whole.reply()
        assert (reply.status, reply.error["code"]) == (503, "engine_dead")
        for given in (error["error"], reply.error):  # without the report, which holds stacks and paths
            form = rf"the engine was killed by {number.name}( \([a-z, ]+\))?; send this request again"
            assert re.fullmatch(form, given["message"])
        assert server.process.wait(PATIENCE) == 1
        wait_until(lambda: any(report in line for line in server.log), f"{server.log}")


def test_health_checks_do_not_keep_the_server_from_ending() -> None:
    with Server.start("--shutdown-timeout", str(10 * PATIENCE)) as server:
        ended = threading.Event()

        def check() -> None:
            with suppress(OSError, http.client.HTTPException):
                while not ended.is_set():
                    server.request("/health")

        threads = [threading.Thread(target=check) for _ in range(8)]
        for thread in threads:
            thread.start()
        assert server.stop() == 128 + signal.SIGTERM
        ended.set()
        for thread in threads:
            thread.join(PATIENCE)


def test_a_stopped_engine_ends_with_the_server() -> None:
    with Server.start("--shutdown-timeout", "0.2") as server:
        pid = engine_pid(server)
        stream = streaming(server, n=16)
        os.kill(pid, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert events_of(stream.read())[-2]["error"]["code"] == "shutting_down"
        assert server.process.wait(PATIENCE) == 128 + signal.SIGTERM
        assert not Path(f"/proc/{pid}").exists()


def test_a_stopped_engine_ends_when_the_server_is_killed() -> None:
    with Server.start() as server:
        pid = engine_pid(server)
        folder = Path(server.engine_address.removeprefix("ipc://")).parent
        os.kill(pid, signal.SIGSTOP)
        server.process.kill()
        server.process.wait(PATIENCE)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the engine stays")
        assert not folder.exists()


@pytest.mark.parametrize("taken", ["a server", "a file"])
def test_a_unix_socket_in_use_is_left_alone(tmp_path: Path, taken: str) -> None:
    path = tmp_path / "quire.sock"
    with socket.socket(socket.AF_UNIX) as other:
        if taken == "a file":
            path.touch()
        else:
            other.bind(str(path))
            other.listen()
        with pytest.raises(AssertionError, match="is not available"):
            Server.start("--uds", str(path))
    assert path.exists()
