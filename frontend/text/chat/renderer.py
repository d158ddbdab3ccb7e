"""Renders chat templates in processes of their own, so that no template can stop or exhaust this one."""

from __future__ import annotations

import math
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from quire.frontend.activity import Activity
from quire.frontend.children import start_child
from quire.frontend.errors import ChatTemplateError
from quire.frontend.text.chat.messages import Message
from quire.frontend.text.chat.render_protocol import RENDER_SECONDS, RenderReply, RenderRequest
from quire.frontend.text.chat.template_files import TemplateSource

MAX_PROCESSES = 4  # at once; each renders one conversation at a time
_IDLE_SECONDS = 0.02  # to wait for a busy process before another is started
_WALL_SECONDS = 60.0  # for `RENDER_SECONDS` of CPU time, on the busiest host
_SAMPLE_SECONDS = 0.5  # between samples of a process that renders
_MOST_IDLE_SAMPLES = 20  # between which it has done nothing


class TemplateRenderer:
    """Renders conversations in up to `MAX_PROCESSES` processes, which start when they are needed and are then kept.

    A template is a program of whoever made the checkpoint, and its work grows with the messages as it pleases; nested
    loops, `10 ** (10 ** 9)` and macros that call themselves twice have no bound that could be enforced in a thread.
    Methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._idle: queue.LifoQueue[_RenderProcess] = queue.LifoQueue()
        self._processes: set[_RenderProcess] = set()
        self._is_starting = False  # one of them
        self._lock = threading.Lock()  # of these
        self._is_closed = False

    def render(self, template: TemplateSource, messages: Sequence[Message], /, **options: Any) -> str:
        """Return the prompt; the arguments are those of `ChatTemplate.render`.

        Raises ChatTemplateError if the template is broken or rejects the messages, or needs too much time or memory, or
        if this is closed meanwhile.
        """
        frame = _encode(RenderRequest(template, messages, options))
        try:
            reply = self._answer(frame)
        except _ProcessKilledError:  # perhaps before it had the request, or for what others did to this host
            reply = self._answer(frame)
        if reply.text is None:
            raise ChatTemplateError(reply.error or "the chat template failed")
        return reply.text

    def close(self) -> None:
        """End the processes, also those that render. Idempotent."""
        with self._lock:
            self._is_closed = True
            processes = list(self._processes)
        for process in processes:
            process.kill()
        with suppress(queue.Empty):
            while True:
                self._end(self._idle.get_nowait())

    def _answer(self, frame: bytes) -> RenderReply:
        """Return the reply of one process, which is kept unless it fails."""
        process = self._take()
        try:
            reply = process.answer(frame)
        except BaseException:
            self._end(process)
            raise
        self._keep(process)
        return reply

    def _take(self) -> _RenderProcess:
        """Return the next idle process; another is started if there is none soon. Most renderings take less than 1 ms.

        Starting takes longer than most conversations of others, so that whichever is idle first is taken.
        """
        while True:
            with suppress(queue.Empty):
                process = self._idle.get(timeout=_IDLE_SECONDS if self._processes else 0.0)
                if process.is_alive or not process.has_answered:
                    return process
                self._end(process)
            self._start_another()

    def _start_another(self) -> None:
        """Start a process beside the others, unless one is being started or there may be no more."""
        with self._lock:
            if self._is_closed:
                raise ChatTemplateError("no chat template is rendered any more: the client was closed")
            if len(self._processes) < MAX_PROCESSES and not self._is_starting:
                process = _RenderProcess()
                self._processes.add(process)
                self._is_starting = True
                threading.Thread(target=self._begin, args=(process,), daemon=True).start()

    def _begin(self, process: _RenderProcess) -> None:
        """Make a new process idle once it takes requests."""
        try:
            process.wait_begun()
        finally:
            self._is_starting = False
            self._keep(process)

    def _keep(self, process: _RenderProcess) -> None:
        self._idle.put(process)
        if self._is_closed:
            self.close()

    def _end(self, process: _RenderProcess) -> None:
        process.end()
        with self._lock:
            self._processes.discard(process)


class _ProcessKilledError(ChatTemplateError):
    """The process ended for another reason than its limit of CPU time."""


class _RenderProcess:
    """A process that runs `render_process`. It ends by itself when this one is gone."""

    def __init__(self) -> None:
        self.has_answered = False
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = start_child(
                [sys.executable, "-P", "-m", "quire.frontend.text.chat.render_process", str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is its owner's
            )
        # A process that is stopped does not read what is sent, which may be more than the socket holds.
        seconds, fraction = divmod(_MOST_IDLE_SAMPLES * _SAMPLE_SECONDS, 1)
        timeout = struct.pack("ll", int(seconds), int(fraction * 1e6))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._connection: Connection[bytes, bytes] = Connection(ours.detach())

    @property
    def is_alive(self) -> bool:
        """False if something has killed it."""
        return self._process.poll() is None

    def wait_begun(self) -> None:
        """Wait until it takes requests, or has ended, of which the next request gets an error."""
        with suppress(EOFError, ConnectionError, _ProcessKilledError):
            if self._has_sent():
                self._connection.recv_bytes()

    def answer(self, frame: bytes) -> RenderReply:
        """Return the reply to a request. Raises ChatTemplateError if the process ends instead; it is then of no use."""
        try:
            self._go_on()
            self._connection.send_bytes(frame)
            if self._has_sent():
                self.has_answered = True
                return msgspec.msgpack.decode(self._connection.recv_bytes(), type=RenderReply)
        except BlockingIOError:
            raise _ProcessKilledError("the process that renders the model's chat template does not read") from None
        except (EOFError, ConnectionError):
            status = self._process.wait()
            if status != -signal.SIGPROF:
                how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
                raise _ProcessKilledError(f"the process that rendered the model's chat template {how}") from None
        raise ChatTemplateError(
            f"the model's chat template did not end within {RENDER_SECONDS:g} s of CPU time with these messages; send "
            "fewer or shorter ones, or use another template"
        )

    def _has_sent(self) -> bool:
        """Wait for a message of the process, as long as it may take; return False if none comes."""
        activity = Activity(self._process.pid)
        for _ in range(math.ceil(_WALL_SECONDS / _SAMPLE_SECONDS)):
            if self._connection.poll(_SAMPLE_SECONDS):
                return True
            self._go_on()
            activity.sample()
            if activity.num_idle_samples >= _MOST_IDLE_SAMPLES:
                raise _ProcessKilledError("the process that renders the model's chat template does nothing")
        return False

    def _go_on(self) -> None:
        """Continue the process, which somebody may have stopped."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process; whoever waits for its answer learns of it. Return when it is gone."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Kill it, and give back the connection, for whose answer nobody waits."""
        self.kill()
        self._connection.close()


def _encode(request: RenderRequest) -> bytes:
    try:
        return msgspec.msgpack.encode(request, enc_hook=_plain)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ChatTemplateError(
            f"the messages, tools or variables of the chat template are not plain data: {error}"
        ) from None


def _plain(value: object) -> object:
    """Return a mapping or sequence as msgspec encodes it. Raises ChatTemplateError for what is neither."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise ChatTemplateError(
        f"the messages, tools or variables of the chat template hold a {type(value).__name__}; give texts, numbers, "
        "lists and dictionaries"
    )
