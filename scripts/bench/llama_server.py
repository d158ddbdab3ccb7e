"""llama.cpp's `llama-server`, restarted when a work needs another number of slots or length."""

from __future__ import annotations

import contextlib
import http.client
import json
import shlex
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.builds import Build, llama_build
from bench.engines import BenchEngine, BenchError, StepBytes, checked
from bench.process import PeerProcess
from bench.work import STEP_TOKENS, Arrivals, BatchTiming, Work

START_SECONDS = 300.0
SPARE_TOKENS = 16  # in addition to prompt and answer, in every slot


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a UNIX socket: no port to choose, and no access for others."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


class LlamaServer(BenchEngine):
    """A GGUF file in `llama-server`, with flash attention "on" or "off" as the variant.

    A prompt is a POST to /completion, all of a batch at once; the times of tokens are those at which the events of its
    stream arrive. Every slot has KV memory of its own, since prompts share nothing, and prompt caching is off.
    """

    def __init__(
        self, binaries: Path, gguf: Path, flash_attention: str, *, threads: int, kv_bytes: StepBytes,
        spec_type: str | None = None,
    ) -> None:  # fmt: skip
        self._program = binaries / "llama-server"
        if not self._program.exists():
            raise BenchError(f"--llama {binaries}: it has no llama-server; give the folder of llama.cpp's programs")
        if not gguf.exists():
            raise BenchError(f"--gguf {gguf}: no such file")
        name = " ".join(["llama.cpp", gguf.stem, *([spec_type] if spec_type else [])])
        super().__init__(name, f"-fa {flash_attention}", lambda work: gguf.stat().st_size + kv_bytes(work))
        self._gguf, self._flash_attention, self._threads = gguf, flash_attention, threads
        self._spec_type = spec_type
        self._shape = (0, 0)
        self._commands: dict[str, None] = {}
        self._messages = ""  # of the last start
        self._process: PeerProcess | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of the socket

    @property
    def build(self) -> Build:
        """Build of the program."""
        return llama_build(self._program, self._threads, self._commands, self._messages)

    def prepare(self, work: Work) -> None:
        """Start the server with a slot for each sequence, unless it is already running."""
        shape = (work.batch, work.longest + SPARE_TOKENS)
        if shape != self._shape:
            self.close()
            self._folder = tempfile.TemporaryDirectory(prefix="bench-llama-")
            command = self._command(*shape)
            self._process = PeerProcess(self.full_name, command)
            self._shape = shape
            self._wait_ready(self._process)
            self._commands[shlex.join(command)] = None
            self._messages = self._process.messages

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> BatchTiming:
        """Generate exactly `max_tokens` tokens for each prompt, greedily."""
        bodies = [self._body(prompt, max_tokens) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as threads:
            begun = time.perf_counter()
            try:
                sequences = tuple(threads.map(self._complete, bodies))
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise self._failure(error) from error
            seconds = time.perf_counter() - begun
        return BatchTiming(seconds, checked(self.full_name, sequences, len(prompts), max_tokens))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let the engine run; between its turns it uses no CPU."""
        assert self._process is not None, "prepare comes first"
        with self._process.running():
            yield

    def close(self) -> None:
        """End the engine, leaving no process behind. Idempotent."""
        self._shape = (0, 0)
        if self._process is not None:
            self._process.close()
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    @property
    def _socket(self) -> str:
        assert self._folder is not None, "prepare comes first"
        return f"{self._folder.name}/llama.sock"

    def _command(self, slots: int, length: int) -> list[str]:
        options: dict[str, Any] = {
            "--model": self._gguf,
            "--host": self._socket,
            "--threads": self._threads,
            "--threads-batch": self._threads,
            "--parallel": slots,
            "--ctx-size": slots * -(-length // 256) * 256,
            "--batch-size": STEP_TOKENS,
            "--flash-attn": self._flash_attention,
            "--cache-ram": 0,
            **({"--spec-type": self._spec_type} if self._spec_type else {}),
        }
        words = [str(word) for option in options.items() for word in option]
        return [str(self._program), *words, "--no-kv-unified", "--offline"]

    def _wait_ready(self, process: PeerProcess) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and process.is_alive():
            with contextlib.suppress(OSError, http.client.HTTPException), self._request("GET", "/health") as answer:
                if answer.status == http.client.OK:
                    return
            time.sleep(0.05)
        raise process.death("starting")

    def _body(self, prompt: Sequence[int], max_tokens: int) -> str:
        request = {
            "prompt": prompt,
            "n_predict": max_tokens,
            "ignore_eos": True,
            "cache_prompt": False,
            "samplers": ["top_k"],
            "top_k": 1,
            "stream": True,
        }
        return json.dumps(request)

    def _complete(self, body: str) -> Arrivals:
        """Return when the tokens of a stream arrived. Raises `ValueError`."""
        with self._request("POST", "/completion", body) as answer:
            if answer.status != http.client.OK:
                raise ValueError(answer.read().decode(errors="replace"))
            arrivals, total = [], 0
            for line in answer:
                if line.startswith(b"data: "):
                    # Tokens of half a character have no event of their own.
                    count = json.loads(line[6:]).get("tokens_predicted", total) - total
                    if count:
                        arrivals.append((time.perf_counter(), count))
                    total += count
            return arrivals

    @contextmanager
    def _request(self, method: str, path: str, body: str | None = None) -> Iterator[http.client.HTTPResponse]:
        connection = _UnixConnection(self._socket)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            yield connection.getresponse()
        finally:
            connection.close()

    def _failure(self, error: Exception) -> BenchError:
        if self._process is None or not self._process.is_alive():
            assert self._process is not None
            return self._process.death("generating")
        return BenchError(f"{self.full_name} failed: {error}")
