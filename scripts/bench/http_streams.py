"""Cheap clients of an HTTP server: one connection a stream, whose events are only counted and timed."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit


@dataclass(slots=True)
class StreamTimes:
    """Times of a stream: `events` counts those with tokens, `times` are those of the reads that had any."""

    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    events: int = 0
    status: int = 0
    done: bool = False

    def token_latencies(self, tokens: int) -> list[float]:
        """Return the seconds from each of the answer's tokens to the next, 0 for those that came in one read."""
        gaps = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        return [0.0] * (tokens - 1 - len(gaps)) + gaps


class StreamClient(asyncio.Protocol):
    """One POST whose answer is a stream of events."""

    def __init__(self, request: bytes, reads: bool = True) -> None:
        self.result = StreamTimes()
        self.began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None
        self._request = request
        self._reads = reads
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass
        self.transport.write(self._request)
        self.result.sent = time.perf_counter()
        if not self._reads:
            self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        """Count the events."""
        result = self.result
        if result.status == 0:
            result.status = int(data[9:12])
            self.began.set_result(None)
        count = data.count(b"data: {")
        if count:
            result.times.append(time.perf_counter())
            result.events += count
        self._tail = (self._tail + data)[-32:]
        if b"[DONE]" in self._tail or result.status != 200:
            result.done = True
            self.close()

    def connection_lost(self, _error: Exception | None) -> None:
        """End the stream."""
        for future in (self.began, self.ended):
            if not future.done():
                future.set_result(None)

    def close(self) -> None:
        """Drop the connection, even in mid-stream."""
        if self.transport is not None:
            self.transport.abort()


async def open_stream(url: str, body: dict[str, object], reads: bool = True) -> StreamClient:
    """Connect and send the request; the answer is read in the background."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    data = json.dumps(body).encode()
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: StreamClient(request, reads), parts.hostname, parts.port)
    return client
