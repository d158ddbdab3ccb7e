"""Renders chat templates in processes of their own, so that no template can stop or exhaust this one."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

import msgspec

from quire.frontend.errors import ChatTemplateError
from quire.frontend.text.chat.messages import Message
from quire.frontend.text.chat.render_protocol import RENDER_SECONDS, RenderReply, RenderRequest
from quire.frontend.text.chat.template_files import TemplateSource

MAX_PROCESSES = 4  # at once; each renders one conversation at a time
_IDLE_SECONDS = 0.1  # to wait for a busy process before another is started
_WALL_SECONDS = 60.0  # for `RENDER_SECONDS` of CPU time, on the busiest host


class TemplateRenderer:
    """Renders conversations in up to `MAX_PROCESSES` processes, which start when they are needed and are then kept.

    A template is a program of whoever made the checkpoint, and its work grows with the messages as it pleases; nested
    loops, `10 ** (10 ** 9)` and macros that call themselves twice have no bound that could be enforced in a thread.
    Methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._idle: queue.LifoQueue[_RenderProcess] = queue.LifoQueue()
        self._num_processes = 0
        self._lock = threading.Lock()  # of their number
        self._is_closed = False

    def render(self, template: TemplateSource, messages: Sequence[Message], /, **options: Any) -> str:
        """Return the prompt; the arguments are those of `ChatTemplate.render`.

        Raises ChatTemplateError if the template is broken or rejects the messages, or needs too much time or memory.
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
        """End the processes. Idempotent."""
        self._is_closed = True
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
        self._idle.put(process)
        if self._is_closed:
            self.close()
        return reply

    def _take(self) -> _RenderProcess:
        """Return an idle process, or a new one if none becomes idle soon; most renderings take less than 1 ms."""
        while True:
            with suppress(queue.Empty):
                process = self._idle.get(timeout=_IDLE_SECONDS if self._num_processes else 0.0)
                if process.is_alive:
                    return process
                self._end(process)
            with self._lock:
                if self._num_processes < MAX_PROCESSES:
                    process = _RenderProcess()
                    self._num_processes += 1
                    return process

    def _end(self, process: _RenderProcess) -> None:
        process.kill()
        with self._lock:
            self._num_processes -= 1


class _ProcessKilledError(ChatTemplateError):
    """The process ended for another reason than its limit of CPU time."""


class _RenderProcess:
    """A process that runs `render_process`. It ends by itself when this one is gone, since its input then ends."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "quire.frontend.text.chat.render_process"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is its owner's
            )

    @property
    def is_alive(self) -> bool:
        """False if something has killed it."""
        return self._process.poll() is None

    def answer(self, frame: bytes) -> RenderReply:
        """Return the reply to a request. Raises ChatTemplateError if the process ends instead; it is then of no use."""
        try:
            self._connection.send_bytes(frame)
            if self._connection.poll(_WALL_SECONDS):
                return msgspec.msgpack.decode(self._connection.recv_bytes(), type=RenderReply)
        except (EOFError, ConnectionError):
            status = self._process.wait()
            if status != -signal.SIGPROF:
                how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
                raise _ProcessKilledError(f"the process that rendered the model's chat template {how}") from None
        raise ChatTemplateError(
            f"the model's chat template did not end within {RENDER_SECONDS:g} s of CPU time with these messages; send "
            "fewer or shorter ones, or use another template"
        )

    def kill(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


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
