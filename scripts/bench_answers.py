"""A stream beside requests with large answers: `.venv/bin/python scripts/bench_answers.py --help`.

Serves the demo model. A process of its own reads a stream, another one sends one large request after the other, or
several at once. The report has the longest gap of the stream, and with `--engine` also that of a plain client of the
engine. Exit status 1 if a gap exceeds 100 ms.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.running_server import serving
from bench_load import quantile

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

_LONGEST_GAP = 0.1
_REST_SECONDS = 0.3
_TOKENS = 1900  # of a neighbour's stream, which begins again when it ends
_PROMPT = [10 + 7 * position % 2000 for position in range(1500)]
_MODEL = {"model": None, "temperature": 1.0, "seed": 1}
_ECHO = {**_MODEL, "prompt": [_PROMPT] * 16, "max_tokens": 1, "echo": True, "logprobs": 5}

Request = tuple[str, dict[str, Any]]


def _completion(**fields: Any) -> Request:
    return "/v1/completions", {**_MODEL, "prompt": "Once upon a time", **fields}


def _chat(**fields: Any) -> Request:
    return "/v1/chat/completions", {**_MODEL, "messages": [{"role": "user", "content": "Tell me a tale."}], **fields}


def _texts(count: int) -> list[str]:
    return [f"The {number}th tale of a cat and a king, who met at the river." for number in range(count)]


KINDS: dict[str, list[Request]] = {
    "n=1000": [_completion(n=1000, logprobs=20, max_tokens=16)],
    "n=128": [_completion(n=128, logprobs=20, max_tokens=64)],
    "chat n=128": [_chat(n=128, logprobs=True, top_logprobs=20, max_tokens=64)],
    "streamed n=128": [_completion(n=128, logprobs=20, max_tokens=64, stream=True)],
    "echo": [("/v1/completions", _ECHO)],
    "1024 prompts": [_completion(prompt=_texts(1024), max_tokens=4)],
    "1000 embeddings": [("/v1/embeddings", {"input": _texts(1000)})],
    "1000 reranks": [("/rerank", {"query": "a cat", "documents": _texts(1000)})],
    "16 echoes": [("/v1/completions", {**_ECHO, "prompt": _PROMPT})] * 16,
    "all": [
        *[("/v1/completions", {**_ECHO, "prompt": _PROMPT})] * 16,
        _completion(n=128, logprobs=20, max_tokens=64),
        _completion(prompt=_texts(1000), max_tokens=4),
    ],
}


def _post(url: str, request: Request) -> http.client.HTTPConnection:
    path, body = request
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection


def read_stream(url: str, channel: Connection[Any, Any]) -> None:
    """Send the times of a stream's increments, those since the last call for them, until told to stop."""
    times: list[float] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            connection = _post(url, _completion(max_tokens=_TOKENS, stream=True, ignore_eos=True))
            response = connection.getresponse()
            times.append(0.0)  # a first token waits for its prompt
            while (line := response.readline()) and not is_over.is_set():
                if line.startswith(b"data: {"):
                    times.append(time.monotonic())
            connection.close()

    reader = threading.Thread(target=read)
    reader.start()
    while channel.recv():
        taken, times[:-1] = times[:], []
        channel.send(taken)
    is_over.set()
    reader.join()


def read_engine(address: str, channel: Connection[Any, Any]) -> None:
    """Do what `read_stream` does as a plain client of the engine."""
    from engine_process import DealerClient

    from quire.protocol.messages import EngineCoreOutputs, EngineCoreRequest, Ready, SamplingParams

    number, times = 0, list[float]()
    with DealerClient(address) as client:
        client.first(Ready)
        is_open = False
        while True:
            if channel.poll():
                if not channel.recv():
                    return
                channel.send(times)
                times = times[-1:]
            if not is_open:
                number, is_open = number + 1, True
                params = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
                client.send(EngineCoreRequest(str(number), [40, 50, 60], params))
                times.append(0.0)
            message = client.receive()
            client.messages.clear()
            if isinstance(message, EngineCoreOutputs) and message.outputs:
                times.append(time.monotonic())
                is_open = all(output.finish_reason is None for output in message.outputs)


def send(url: str, requests: Sequence[Request], channel: Connection[Any, Any]) -> None:
    """Send the requests at once, when told to, read their answers, and report their sizes."""
    channel.send(True)
    channel.recv()
    sizes: list[int] = []

    def answer(request: Request) -> None:
        response = _post(url, request).getresponse()
        data = response.read()
        sizes.append(len(data))
        if response.status != 200:
            print(response.status, data[:500])

    threads = [threading.Thread(target=answer, args=(request,)) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    channel.send(sizes)


class Neighbour:
    """A process that reads a stream."""

    def __init__(self, read: Callable[..., None], address: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._channel, theirs = context.Pipe()
        self._process = context.Process(target=read, args=(address, theirs))
        self._process.start()
        while len(self.gaps()) < 3:
            time.sleep(0.2)

    def gaps(self) -> list[float]:
        """Return the gaps between its increments since the last call."""
        self._channel.send(True)
        times = self._channel.recv()
        return [after - before for before, after in itertools.pairwise(times) if before and after]

    def end(self) -> None:
        """End the process."""
        self._channel.send(False)
        self._process.join()


def main() -> int:
    """Measure beside each kind; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="in turn (default: all)")
    parser.add_argument("--engine", action="store_true", help="measure a plain client of the engine too")
    parser.add_argument("--server", nargs=2, metavar=("URL", "ENGINE"), help="measure a running server")
    arguments = parser.parse_args()
    if arguments.server:
        url, engine_address = arguments.server
        return measure(url, engine_address, arguments)
    with serving([]) as server:
        return measure(server.url, server.engine_address, arguments)


def measure(url: str, engine_address: str, arguments: argparse.Namespace) -> int:
    """Measure beside each kind; return the exit status."""
    context = multiprocessing.get_context("spawn")
    neighbours = [Neighbour(read_stream, url)]
    if arguments.engine:
        neighbours.append(Neighbour(read_engine, engine_address))
    longest = 0.0
    for kind in arguments.kinds:
        ours, theirs = context.Pipe()
        process = context.Process(target=send, args=(url, KINDS[kind], theirs))
        process.start()
        ours.recv()  # the process has begun
        time.sleep(_REST_SECONDS)
        for neighbour in neighbours:
            neighbour.gaps()
        begun = time.monotonic()
        ours.send(True)
        sizes = ours.recv()
        seconds = time.monotonic() - begun
        time.sleep(_REST_SECONDS)
        gaps = [neighbour.gaps() for neighbour in neighbours]
        process.join()
        longest = max(longest, *(max(own, default=0.0) for own in gaps))
        shown = "; engine ".join(
            f"longest {1e3 * max(own, default=0):.0f} ms, p99 {1e3 * quantile(own or [0.0], 0.99):.0f}" for own in gaps
        )
        print(f"{kind}: {shown}; {seconds:.1f} s, {sum(sizes) / 1e6:.2f} MB", flush=True)
    for neighbour in neighbours:
        neighbour.end()
    return 0 if longest <= _LONGEST_GAP else 1


if __name__ == "__main__":
    sys.exit(main())
