"""A real server for tests: a process of `quire serve`, and requests to it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from patience import PATIENCE
from quire_command import quire_command

from quire.frontend import LLM
from quire.protocol.address import is_alive

_ENGINE = re.compile(r"quire: engine listening at (\S+)")
_SERVING = re.compile(r"quire: serving (.+) at (\S+)")
_LOADED = re.compile(r"its engine listens at (\S+)$")


@dataclass
class Reply:
    """The response to a request."""

    status: int
    headers: dict[str, str]  # header values by lower-case name
    body: bytes

    def json(self) -> Any:
        """Return the decoded body."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error in OpenAI's shape, with all of its members."""
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["message"], error
        return dict(error)


@dataclass
class Server:
    """`quire serve` in a process of its own, on a free port. At the end, its engines must hold no pages.

    `model`: the names of its models, separated by commas; with several, `engine_address` is empty.
    """

    process: subprocess.Popen[str]
    url: str
    model: str
    engine_address: str
    log: list[str] = field(default_factory=list)
    _reader: threading.Thread | None = None

    @classmethod
    def start(cls, *arguments: str, environment: dict[str, str] | None = None) -> Self:
        """Start a server and wait until it is ready."""
        process = subprocess.Popen(
            quire_command("serve", "--port", "0", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while _ENGINE.match(lines[-1]):  # one for each engine of a single model
            lines.append(process.stdout.readline())
        engine, serving = _ENGINE.match(lines[0]), _SERVING.match(lines[-1])
        if serving is None:
            process.kill()
            raise AssertionError(f"the server did not start: {lines} {process.communicate()}")
        server = cls(process, serving[2], serving[1], "" if engine is None else engine[1])
        server._reader = threading.Thread(target=server._read_log, daemon=True)
        server._reader.start()
        return server

    def request(
        self,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        method: str | None = None,
    ) -> Reply:
        """Send a GET, or with a body a POST: any value as JSON, bytes unchanged."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = {} if data is None else {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, {**given, **(headers or {})}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
                return Reply(reply.status, {k.lower(): v for k, v in reply.headers.items()}, reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())

    @property
    def engine_pid(self) -> int:
        """Process id of the engine, the first process that the server has started."""
        tasks = sorted(Path(f"/proc/{self.process.pid}/task").iterdir(), key=lambda task: int(task.name))
        return int(next(pid for task in tasks for pid in (task / "children").read_text().split()))

    @property
    def engine_addresses(self) -> list[str]:
        """The addresses of the engines that are there: of the models that are loaded."""
        noted = [match[1] for line in self.log if (match := _LOADED.search(line.strip())) is not None]
        return [address for address in (self.engine_address, *noted) if address and is_alive(address)]

    def check_pages(self) -> None:
        """Wait until the engines are idle, then check that no page is held and that the counts of pages add up."""
        addresses = self.engine_addresses
        assert addresses or any("unloading" in line for line in self.log) or not self.engine_address
        for address in addresses:
            self._check_pages(address)

    def _check_pages(self, address: str) -> None:
        with LLM(engine_address=address) as llm:
            deadline = time.monotonic() + PATIENCE
            while (stats := llm.stats())["running"] + stats["waiting"]:
                assert time.monotonic() < deadline, stats
            assert stats["pages_free"] + stats["pages_cached"] + stats["pages_held"] == stats["pages_total"], stats
            assert stats["pages_held"] == 0, stats

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; return the exit status. `log` is then complete."""
        self.process.send_signal(number)
        status = self.process.wait(PATIENCE)
        assert self._reader is not None
        self._reader.join(PATIENCE)
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self.process.poll() is None and kind is None:
                self.check_pages()
        finally:
            if self.process.poll() is None:
                self.stop()
            assert self.process.stdout is not None
            self.process.stdout.close()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            self.log.extend(iter(stderr.readline, ""))


def events_of(body: bytes) -> list[Any]:
    """Return the decoded data of server-sent events; `[DONE]` stays a text."""
    data = [line.removeprefix("data: ") for line in body.decode().split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in data]


def folder_of_demo_model() -> Path:
    """Return the folder of the demo model."""
    from quire.frontend.engine_args import DEMO_MODEL

    return Path(DEMO_MODEL)
