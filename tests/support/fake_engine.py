"""A fake engine without a model, whose messages the test receives and sends."""

from __future__ import annotations

import queue
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq
from patience import PATIENCE

from quire.frontend.client.engine_client import CoreClient, Delivery
from quire.protocol.address import default_address, remove_address
from quire.protocol.codec import EngineDecoder, encode
from quire.protocol.messages import (
    PROTOCOL_VERSION,
    ClientMessage,
    EngineMessage,
    Hello,
    Ping,
    Ready,
)
from quire.protocol.sockets import bind_engine

NEVER = 3600.0  # seconds: a heartbeat that no test sees; the fake engine answers none

M = TypeVar("M", bound=ClientMessage)


def ready(heartbeat: float = NEVER) -> Ready:
    """Return the description of an engine."""
    return Ready(
        protocol_version=PROTOCOL_VERSION,
        model="/nowhere",
        architecture="FakeForCausalLM",
        max_model_len=64,
        vocab_size=100,
        num_pages=8,
        block_size=16,
        max_num_seqs=4,
        engine_pid=1,
        heartbeat_seconds=heartbeat,
        eos_token_ids=[4],
    )


class FakeEngine:
    """A ROUTER socket controlled by the test; `deliveries` are those of the attached client."""

    def __init__(self) -> None:
        self.address = default_address()
        self.deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = bind_engine(self._context, self.address)
        self._decoder = EngineDecoder()
        self._client_id = b""
        self._pool = ThreadPoolExecutor(1)
        self._clients: list[CoreClient] = []

    def connect(self, **options: Any) -> Future[CoreClient]:
        """Start to construct a client; it waits for an answer to its Hello."""
        return self._pool.submit(CoreClient, self.address, self.deliveries.put, **{"timeout": PATIENCE, **options})

    def attach(self, heartbeat: float = NEVER, **options: Any) -> CoreClient:
        """Return a client that is ready."""
        future = self.connect(**options)
        self.receive(Hello)
        self.send(ready(heartbeat))
        self._clients.append(future.result(PATIENCE))
        return self._clients[-1]

    def receive(self, kind: type[M]) -> M:
        """Return the next message of the client, which must be of this kind. Pings are skipped unless requested."""
        while True:
            assert self._router.poll(int(PATIENCE * 1000)), f"no {kind.__name__} has come"
            self._client_id, *frames = self._router.recv_multipart()
            message = self._decoder.decode(frames)
            if isinstance(message, kind):
                return message
            assert isinstance(message, Ping), f"a {kind.__name__} was expected, and {message} came"

    def send(self, message: EngineMessage) -> None:
        """Send a message to the client that sent the last one."""
        self._router.send_multipart([self._client_id, *encode(message)])

    def delivered(self) -> Delivery:
        """Return the next delivery of the client."""
        return self.deliveries.get(timeout=PATIENCE)

    def die(self) -> None:
        """Close the socket without a message, as a process that is killed."""
        self._router.close(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for client in self._clients:
            client.close()
        self._pool.shutdown()
        self._router.close(linger=0)
        self._context.term()
        remove_address(self.address)
