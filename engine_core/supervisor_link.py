"""The link to the engine's supervisor, the process that has started it: lines of a word and JSON on stdout and stdin.

The engine writes BEGUN when it goes on after it has stood by, STAGE as it begins another part of its start, LOADED when
its model is loaded (and waits for a line then, with --standby=model), BLAMED if a request has caused deaths before it,
READY and its address when clients can connect, BEAT every second as a sign of life, and RELOAD when a client asks for
another engine in its place. The supervisor answers REFUSED, or GIVE_WAY once that one waits for the end of this one.
STOP and ABORT end the engine for good: when the open requests have ended, or at once.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from typing import Any

import msgspec

from quire.engine_core.engine import EngineCore
from quire.engine_core.loop import EngineLoop
from quire.engine_core.transport.server import EngineServer
from quire.engine_core.utilities import DEFERRED
from quire.protocol.engine_options import SECONDS_OR_ZERO
from quire.protocol.messages import UtilityCall, UtilityResult


class Answer(msgspec.Struct):
    """The supervisor's answer to the reload `number`: an error, or the process id of the engine that comes."""

    number: int
    error: str | None = None
    engine_pid: int = 0
    drain_timeout: float = 0.0


def write_line(word: str, rest: str | dict[str, Any]) -> None:
    """Write a line to the supervisor, if anybody reads it."""
    text = rest if isinstance(rest, str) else msgspec.json.encode(rest).decode()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(f"{word} {text}\n")  # one write, since threads share stdout
        sys.stdout.flush()


def read_line() -> str:
    """Read a line of the supervisor; "" if it is gone. Without a buffer, whose lock a waiting thread would hold."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        return stdin.readline().decode(errors="replace")


def wait_to_begin() -> bool:
    """Stand by until the supervisor writes a line, and say that it was read; return False if the supervisor is gone."""
    if not read_line():
        return False
    write_line("BEGUN", "")
    return True


class Stages:
    """The parts of the engine's start, of which the supervisor names the one that does not end."""

    def __init__(self, is_supervised: bool) -> None:
        self._is_supervised = is_supervised
        self._current = ""

    def begin(self, what: str, *, waits: bool = False) -> None:
        """Begin a part, or go on with it. One that `waits` for another engine does nothing meanwhile."""
        if self._is_supervised and what != self._current:
            self._current = what
            write_line("STAGE", {"what": what, "waits": waits})


class SupervisorLink:
    """The talk with the supervisor of a running engine, and the calls of `reload` that wait for its answer."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[bytes, int]] = {}  # client and call, by number
        self._answer: Answer | None = None  # to be given when this engine leaves

    def start(self, seconds: float, core: EngineCore, server: EngineServer, loop: EngineLoop) -> None:
        """Write signs of life every so many `seconds`, and carry out what the supervisor writes, on threads."""
        self._server = server
        for name, work in (("heart", lambda: self._beat(seconds, core)), ("orders", lambda: self._read(loop))):
            threading.Thread(target=work, name=f"quire-engine-{name}", daemon=True).start()

    def reload(self, client_id: bytes, call: UtilityCall) -> object:
        """Pass a call of `reload` on, to be answered when there is an answer. Raises ValueError for bad arguments."""
        if call.reload is None:
            raise ValueError("the utility call 'reload' needs its field reload: the settings to change")
        SECONDS_OR_ZERO.check("drain_timeout", call.reload.drain_timeout)
        for name, value in call.reload.settings.items():
            if isinstance(value, float) and not math.isfinite(value):  # JSON has none
                raise ValueError(f"{name}={value} is not a number")
        number = len(self._calls)
        self._calls[number] = client_id, call.call_id
        write_line("RELOAD", {"number": number, **msgspec.structs.asdict(call.reload)})
        return DEFERRED

    def leave(self) -> None:
        """Answer the call for which this engine gives way: another one takes its place."""
        if self._answer is not None:
            self._send(self._answer)

    def _beat(self, seconds: float, core: EngineCore) -> None:
        while True:
            age = max(0.0, time.monotonic() - self._server.last_step)  # -inf while there is nothing to do
            write_line("BEAT", {"step_age": age, "state": core.last_stats})
            time.sleep(seconds)

    def _read(self, loop: EngineLoop) -> None:
        while line := read_line():
            word, _, rest = line.strip().partition(" ")
            if word == "STOP":
                loop.drain()
            elif word == "ABORT":
                loop.stop()
            else:
                self._take_answer(word, msgspec.json.decode(rest, type=Answer), loop)

    def _take_answer(self, word: str, answer: Answer, loop: EngineLoop) -> None:
        if word == "GIVE_WAY":
            self._answer = answer
            loop.give_way(answer.drain_timeout)
        else:
            self._send(answer)

    def _send(self, answer: Answer) -> None:
        client_id, call_id = self._calls[answer.number]
        with contextlib.suppress(RuntimeError):  # the socket's thread has failed, and the engine ends
            result = {"engine_pid": answer.engine_pid}
            self._server.send(client_id, UtilityResult(call_id, None if answer.error else result, answer.error))
