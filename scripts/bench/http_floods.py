"""A stream of a `serve` process beside connections that send cheap bytes as fast as they can."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from itertools import pairwise
from multiprocessing.context import SpawnContext
from multiprocessing.synchronize import Event
from pathlib import Path
from urllib.parse import urlsplit

from bench.running_server import serving

from quire.frontend.http.transport.bodies import MAX_ITEMS

_UNKNOWN_KEYS = 4  # of each message: a body may have so many fields of objects
_HOST = b" HTTP/1.1\r\nHost: localhost\r\n"
_POST = b"POST /v1/completions" + _HOST + b"Content-Type: application/json\r\n"


@dataclass(frozen=True)
class HttpFlood:
    """A flood: the bytes that each of several connections sends again and again."""

    make: Callable[[], bytes]
    connections: int


def _repeated(request: bytes, times: int) -> bytes:
    return (request + b"\r\n") * times


def _in_tiny_chunks(size: int) -> bytes:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in _body("x" * size))
    return _POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def _completion(prompt: Callable[[], object]) -> bytes:
    return _post("/v1/completions", _body(prompt()))


def _long_chat(path: str, field: str, value: object) -> bytes:
    """Return a request with as many messages as one may have, each with keys of its own that are not known."""
    messages = [
        {"role": "user", "content": "hi", **{f"x{number}_{key}": value for key in range(_UNKNOWN_KEYS)}}
        for number in range(MAX_ITEMS)
    ]
    limits = {"max_tokens": 1} if path == "/v1/messages" else {}
    return _post(path, json.dumps({field: messages, **limits}).encode())


def _field(api: str) -> str:
    return "input" if api == "responses" else "messages"


def _post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _body(prompt: object) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": 1}).encode()


_CHATS = {
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "chats": "/v1/chat/completions",
    "ollama": "/api/chat",
}

_PING = partial(_repeated, b"GET /ping" + _HOST, 5000)
_UNKNOWN = partial(_repeated, b"GET /nothing" + _HOST, 5000)
_PREFLIGHT = partial(
    _repeated,
    b"OPTIONS /v1/completions" + _HOST + b"Origin: http://localhost:3000\r\nAccess-Control-Request-Method: POST\r\n",
    3000,
)
_CHUNKS = partial(_in_tiny_chunks, 1 << 20)
_HEADERS = partial(_repeated, b"GET /ping" + _HOST + b"a:\r\n" * 12_000, 10)
_TOKEN_IDS = partial(_completion, lambda: [5] * 500_000)
_EMBEDDINGS = partial(_post, "/v1/embeddings", json.dumps({"input": ["Once upon a time"] * 1000}).encode())
_TEXT = partial(_completion, lambda: "hello " * 1_200_000)

HTTP_FLOODS = {
    "pings": HttpFlood(_PING, 1),
    "pings x8": HttpFlood(_PING, 8),
    "unknown paths x8": HttpFlood(_UNKNOWN, 8),
    "preflights x8": HttpFlood(_PREFLIGHT, 8),
    "headers x8": HttpFlood(_HEADERS, 8),
    "tiny chunks": HttpFlood(_CHUNKS, 1),
    "tiny chunks x8": HttpFlood(_CHUNKS, 8),
    "token ids": HttpFlood(_TOKEN_IDS, 1),
    "token ids x16": HttpFlood(_TOKEN_IDS, 16),
    "texts x4": HttpFlood(_TEXT, 4),
    "texts to embed x8": HttpFlood(_EMBEDDINGS, 8),
    **{
        f"{name} with {kind} keys x8": HttpFlood(partial(_long_chat, path, _field(name), value), 8)
        for name, path in _CHATS.items()
        for kind, value in (("null", None), ("unknown", 1))
    },
}


def measure_floods(
    context: SpawnContext,
    model: Path,
    kinds: list[str],
    seconds: float,
    report: Callable[[str, float, list[float]], None],
) -> None:
    """Report the events per second of a stream beside each kind, and the gaps between them; first beside nothing."""
    with serving(["--model", str(model), "--threads", "1", "--log-level", "error"]) as server:
        for kind in ["", *kinds]:
            begun, stop = context.Event(), context.Event()
            other = context.Process(target=_flood, args=(server.url, kind, begun, stop))
            if kind:
                other.start()
                begun.wait()
            rate, gaps = _measure(server.url, seconds)
            stop.set()
            if kind:
                other.join()
            report(f"http {kind or 'nothing'}", rate, gaps)


def _measure(url: str, seconds: float) -> tuple[float, list[float]]:
    connection = HTTPConnection(urlsplit(url).netloc)
    stream = {"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(stream), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    times = list[float]()
    while not times or times[-1] - times[0] < seconds:
        if answer.readline().startswith(b"data"):
            times.append(time.monotonic())
    connection.close()
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return len(gaps) / (times[-1] - times[0]), gaps


def _flood(url: str, kind: str, begun: Event, stop: Event) -> None:
    """Send from all connections until told to stop; read what comes back."""
    address, flood = urlsplit(url), HTTP_FLOODS[kind]
    data = flood.make()

    async def send() -> None:
        while True:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            reading = asyncio.ensure_future(_read(reader))
            try:
                with suppress(ConnectionError):
                    while not reading.done():
                        writer.write(data)
                        begun.set()
                        await writer.drain()
            finally:
                reading.cancel()
                writer.transport.abort()

    async def send_all() -> None:
        tasks = [asyncio.ensure_future(send()) for _ in range(flood.connections)]
        await asyncio.to_thread(stop.wait)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    asyncio.run(send_all())


async def _read(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        while await reader.read(1 << 20):
            pass
