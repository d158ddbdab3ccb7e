"""Times in which KV pages come from an engine, measured as another engine that fetches them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

import zmq

from quire.protocol.codec import ClientDecoder, encode
from quire.protocol.engine_shape import EngineShape
from quire.protocol.keys import Security
from quire.protocol.messages import (
    PROTOCOL_VERSION,
    ClientMessage,
    EngineMessage,
    ErrorMessage,
    Goodbye,
    Hello,
    KvAck,
    KvFetch,
    KvFetched,
    KvHello,
    KvPage,
    KvWelcome,
    Ready,
)
from quire.protocol.simulation import FetchTime
from quire.protocol.sockets import connect_client

_REPEATS = 9
_PATIENCE_MS = 60_000  # for the next message; the first one waits for a checksum of the checkpoint


class FetchError(Exception):
    """The engine sends no pages. The message says why."""


def measure_fetches(address: str, security: Security, shape: EngineShape, tokens: Sequence[int]) -> FetchTime:
    """Return the times of fetches from an idle engine that has the full pages of these tokens in its prefix cache.

    What the engine that fetches does with a page, a checksum and a copy, is done while the next one comes, and left out
    here. Raises FetchError if the engine sends no pages.
    """
    with zmq.Context[zmq.Socket[bytes]]() as context, connect_client(context, address, security) as socket:
        socket.rcvtimeo, socket.linger = _PATIENCE_MS, 0
        peer = _Peer(socket, shape.block_size)
        connect = peer.connect()
        others = [random.Random(0).choices(range(shape.vocab_size), k=len(tokens)) for _ in range(_REPEATS)]
        answer = statistics.median(peer.fetch(each)[0] for each in others)
        found = [peer.fetch(tokens) for _ in range(_REPEATS)]
        peer.send(Goodbye())
    if not all(count for _, count in found):
        raise FetchError("the engine has no page of a prompt that it has just served")
    per_token = statistics.median((seconds - answer) / (count * shape.block_size) for seconds, count in found)
    return FetchTime(connect, answer, max(per_token, 0.0))


class _Peer:
    """A client that fetches pages as an engine does."""

    def __init__(self, socket: zmq.Socket[bytes], block_size: int) -> None:
        self._socket = socket
        self._block_size = block_size
        self._decoder = ClientDecoder()
        self._num_fetches = 0

    def send(self, message: ClientMessage) -> None:
        self._socket.send_multipart(encode(message))

    def connect(self) -> float:
        """Return the seconds until there are pages to fetch, twice those of the checksum: both engines compute it."""
        self.send(Hello(PROTOCOL_VERSION, "calibration"))
        while not isinstance(self._receive(), Ready):
            pass
        begun = time.monotonic()
        self.send(KvHello())
        while not isinstance(message := self._receive(), KvWelcome):
            pass
        if not message.format:
            raise FetchError("the engine does not know the format of its KV")
        return 2 * (time.monotonic() - begun)

    def fetch(self, tokens: Sequence[int]) -> tuple[float, int]:
        """Fetch the full pages of a prefix; return the seconds and the number of pages that have come."""
        self._num_fetches += 1
        most, count = (len(tokens) - 1) // self._block_size, 0
        begun = time.monotonic()
        self.send(KvFetch(self._num_fetches, list(tokens[: most * self._block_size + 1]), "", 0, most))
        while not isinstance(message := self._receive(), KvFetched):
            if isinstance(message, KvPage):
                count += 1
                self.send(KvAck(self._num_fetches, count))
        if message.error is not None:
            raise FetchError(message.error)
        return time.monotonic() - begun, count

    def _receive(self) -> EngineMessage:
        """Return the next message. Raises FetchError for an error, or when none comes."""
        try:
            frames = self._socket.recv_multipart(copy=False)
        except zmq.Again:
            raise FetchError("the engine does not answer") from None
        message = self._decoder.decode([frame.buffer for frame in frames])
        if isinstance(message, ErrorMessage):
            raise FetchError(message.message)
        return message
