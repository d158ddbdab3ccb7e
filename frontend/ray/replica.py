"""A replica of the engine: an actor that supervises one, and relays requests to it."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, cast

import msgspec

from quire.frontend.client.engine import ConnectedEngine
from quire.frontend.client.engine_client import Delivery, EngineAway, EngineBack
from quire.frontend.client.routing import Routing
from quire.frontend.engine_args import EngineArgs
from quire.frontend.errors import EngineDeadError
from quire.frontend.ray.cached_prefixes import CachedPrefixes, ReportingRouter
from quire.frontend.ray.cpus import bind_process, numa_nodes, part_of
from quire.frontend.ray.scaling import TOKENS
from quire.protocol.codec import EngineDecoder, encode
from quire.protocol.messages import (
    MAX_WATCHED_SALTS,
    Abort,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    PrefixReport,
    UtilityCall,
)

CLOCK = struct.Struct("<d")
"""The first item of a relay: the replica's monotonic clock, in seconds, which the times of its engine are of."""

HEARTBEAT_SECONDS = 5.0
"""Seconds after which a relay that has nothing to say sends an empty item."""

PREFIXES = "prefixes"
"""Name of the keys of cached prefixes among what routers are told of a replica."""

_ITEMS_PER_SECOND = 1000  # of all relays of a replica, beside the first outputs and the last; each takes Ray 0.3 ms


class EngineReplica:
    """The deployment of the engines.

    A relay that ends without a last output has been lost: the engine has died, or the replica ends. Its caller sends
    the request again, with the tokens that have arrived.
    """

    async def __init__(  # type: ignore[misc] # Ray Serve awaits it
        self, options: dict[str, Any], replicas_per_node: int = 1
    ) -> None:
        """Start an engine with these arguments of `EngineArgs`, and wait until it is ready."""
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._cached = CachedPrefixes(1)
        self._open: dict[str, Relay] = {}  # by the ids of their requests
        self._has_engine = asyncio.Event()
        self._decoder = EngineDecoder()
        if replicas_per_node > 1:
            bind_process(part_of(os.sched_getaffinity(0), numa_nodes(), _local_rank(), replicas_per_node))
        self._engine = await asyncio.to_thread(self._start, options)
        self._salts: dict[str, None] = {"": None}  # of all requests
        self._watch_all()
        self._has_engine.set()

    async def relay(self, frame: bytes, text_files: str) -> AsyncGenerator[bytes, None]:
        """Yield this machine's clock, and then the outputs of a request: `EngineCoreOutputs`, encoded.

        `frame`: an encoded `EngineCoreRequest`, whose id no other request of any caller has. `text_files`: what the
        caller reads tokens by, see `Ready`. An empty item says that the replica is alive. Raises `RuntimeError` if the
        engine reads them by others, as while the application is deployed with another model.
        """
        if text_files != self._engine.engines.ready.text_files:
            raise RuntimeError("the model has been replaced by one with another tokenizer; send the request again")
        request = cast("EngineCoreRequest", self._decoder.decode([frame]))
        relay = self._open[request.request_id] = Relay(request)
        try:
            yield CLOCK.pack(time.monotonic())
            while not await _happens(self._has_engine, HEARTBEAT_SECONDS):
                yield b""
            with suppress(EngineDeadError):  # then it is lost
                self._note_salt(request.cache_salt)
                self._engine.engines.first.send(msgspec.structs.replace(request, arrival_time=time.monotonic()))
                while not relay.is_over:
                    yield await relay.take(HEARTBEAT_SECONDS)
                    await relay.pause(len(self._open) / _ITEMS_PER_SECOND)
                if relay.has_outputs:
                    yield await relay.take(0)
        finally:
            del self._open[request.request_id]
            if not relay.has_ended:
                with suppress(EngineDeadError):
                    self._engine.engines.first.send(Abort([request.request_id]))

    async def describe(self) -> bytes:
        """Return the engine's description of itself, an encoded `Ready`."""
        return bytes(encode(self._engine.engines.ready)[0])

    async def call(self, frame: bytes) -> bytes:
        """Return the result of a utility call of the engine, as msgpack. Raises `RuntimeError`."""
        call = cast("UtilityCall", self._decoder.decode([frame]))
        future = self._engine.engines.call(call.method, call.token_ids, call.cache_salt, shown=call.shown)
        return msgspec.msgpack.encode(await asyncio.wrap_future(future))

    async def check_health(self) -> None:
        """Raise `EngineDeadError` once no engine will come back; Ray Serve then replaces the replica."""
        if (error := self._engine.engines.dead) is not None:
            raise EngineDeadError(*error.args)

    async def record_routing_stats(self) -> dict[str, bytes]:
        """Return what routers need to know: the prefixes that are cached, see `CachedPrefixes.encode`."""
        return {PREFIXES: self._cached.encode()}

    async def record_autoscaling_stats(self) -> dict[str, int]:
        """Return what the autoscaling goes by: tokens of the open requests."""
        return {TOKENS: sum(relay.num_tokens for relay in self._open.values())}

    def __del__(self) -> None:
        """End the engine. Ray Serve calls it at the end of a replica, whose relays have ended by then, or had time.

        Python calls it once more, maybe in a thread that is being started: then it must not start one.
        """
        if (engine := getattr(self, "_engine", None)) is not None and not self._is_closed:
            self._is_closed = True
            engine.close()

    def _start(self, options: dict[str, Any]) -> ConnectedEngine:
        args = EngineArgs.from_options(options.get("model"), {**options, "skip_tokenizer_init": True})
        return ConnectedEngine(args, self._deliver, routing=Routing(ReportingRouter(self._deliver)))

    def _watch_all(self) -> None:
        """Have a new engine, whose cache is empty, report the prefixes of all salts."""
        self._cached = CachedPrefixes(self._engine.engines.ready.block_size)
        self._watch(list(self._salts))

    def _note_salt(self, salt: str) -> None:
        """Have the engine report the prefixes of a salt, too."""
        if salt not in self._salts and len(self._salts) < MAX_WATCHED_SALTS:
            self._salts[salt] = None
            self._watch([salt])

    def _watch(self, salts: list[str]) -> None:
        engines = self._engine.engines
        engines.watch(engines.first.session, salts)

    def _deliver(self, delivery: Delivery) -> None:
        """Pass a delivery on; on the client's thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._take, delivery)

    def _take(self, delivery: Delivery) -> None:
        if isinstance(delivery, EngineCoreOutputs):
            for output in delivery.outputs:
                if (relay := self._open.get(output.request_id)) is not None:
                    relay.put(output, delivery.timestamp)
        elif isinstance(delivery, PrefixReport):
            self._cached.take(delivery)
        elif isinstance(delivery, EngineBack):
            if hasattr(self, "_engine"):  # else `__init__` does it
                self._watch_all()
            self._has_engine.set()
        else:  # the engine is away or dead, or has rejected a message, nobody knows of which request
            if isinstance(delivery, EngineAway):
                self._cached.clear()
                self._has_engine.clear()
            for relay in self._open.values():
                relay.lose()


class Relay:
    """The outputs of one request on their way to the ingress."""

    def __init__(self, request: EngineCoreRequest) -> None:
        self.num_tokens = len(request.prompt_token_ids) + len(request.generated_token_ids)
        self.has_ended = False  # its last output has come
        self._outputs: list[EngineCoreOutput] = []
        self._timestamp = 0.0
        self._news = asyncio.Event()
        self._over = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """True if no more outputs come."""
        return self._over.is_set()

    @property
    def has_outputs(self) -> bool:
        """True if there are outputs to take."""
        return bool(self._outputs)

    def put(self, output: EngineCoreOutput, timestamp: float) -> None:
        """Add an output of a step at `timestamp`."""
        self._outputs.append(output)
        self._timestamp = timestamp
        self.num_tokens += len(output.new_token_ids)
        self._news.set()
        if output.finish_reason is not None:
            self.has_ended = True
            self._over.set()

    def lose(self) -> None:
        """Note that no more outputs come, since the engine that has the request is gone."""
        self._over.set()
        self._news.set()

    async def take(self, seconds: float) -> bytes:
        """Return the outputs that have come, encoded, once there are some; nothing after `seconds`, or at a loss."""
        if not self._outputs and not self.is_over:
            await _happens(self._news, seconds)
        self._news.clear()
        outputs, self._outputs = self._outputs, []
        return bytes(encode(EngineCoreOutputs(outputs, None, self._timestamp))[0]) if outputs else b""

    async def pause(self, seconds: float) -> None:
        """Wait, so that more outputs come together, until it is over at most."""
        await _happens(self._over, seconds)


async def _happens(event: asyncio.Event, seconds: float) -> bool:
    """Wait until an event is set, and for `seconds` at most; return whether it is."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


def _local_rank() -> int:
    """Return the number of this replica among those on its node."""
    from ray import serve

    return int(serve.get_replica_context().rank.local_rank)
