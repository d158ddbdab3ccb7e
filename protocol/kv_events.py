"""KV events: what an engine's prefix cache gains and loses, for routers. Format, names and defaults are vLLM's.

A batch is sent as three frames: the topic, its number (8 bytes, big-endian) and `[ts, events, rank]` in msgpack, where
each event is a map whose `type` is the name of its class. A gap in the numbers means that batches were lost, or that
another engine has begun: its numbers are greater. To have batches again, send an empty frame and the first number that
is wanted from a DEALER to the replay endpoint: it answers with the batches that are still kept, each an empty frame and
its three frames, and ends with the number -1. Where these begin later than was asked, forget all pages.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from quire.protocol.address import ipc_path
from quire.protocol.errors import AddressError
from quire.protocol.options import json_object

CACHE_MEDIUM = "GPU"
"""The medium by which routers know an engine's own cache, wherever its memory is."""

_MOST_BATCHES = 1 << 20
_MOST_TOPIC_BYTES = 256
_TCP = re.compile(r"tcp://(?P<host>[^\s/]+):(?P<port>[0-9]{1,5})")
_LAST_PORT = 65535


class KvEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Base of all events."""


class BlockStored(KvEvent):
    """Pages that follow one another have come into the cache.

    `block_hashes`: 64 bits of a hash of the salt and all tokens up to the end of each page; `parent_block_hash`: the
    same of what is before them, None at the beginning. `token_ids` are those of all pages, and `block_size` those of
    one. `extra_keys`: for each page of a salted prefix a hash of the salt.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str]] | None = None


class BlockRemoved(KvEvent):
    """Pages have left the cache."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(KvEvent):
    """The cache is empty: an engine begins with this."""


class KvEventBatch(msgspec.Struct, array_like=True, gc=False):
    """The events of a step, in order; `ts`: Unix time in seconds."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int = 0


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of the publishing of KV events.

    `endpoint`: `ipc://PATH`, `tcp://*:PORT` and `tcp://[::]:PORT` are bound, another `tcp://` is connected to, as that
    of a router; `replay_endpoint` is always bound. `buffer_steps`: batches that are kept to replay, up to 64 MiB.
    `max_queue_size`: batches that may wait to be sent, at most 256; while there are so many, further changes wait to
    become one batch. `hwm`: batches that wait for a subscriber; one that is slower misses the newest.
    `insecure_tcp`: allow tcp, which has the tokens of all prompts and answers in clear text, for whoever reaches it.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    insecure_tcp: bool = False

    @property
    def is_enabled(self) -> bool:
        """True if events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def binds(self) -> bool:
        """True if subscribers connect to the engine, and not the engine to one."""
        return self.endpoint.startswith("ipc://") or "*" in self.endpoint or "::" in self.endpoint


def parse_kv_events_config(text: str) -> KvEventsConfig:
    """Return the configuration in a JSON object. Raises `ValueError` for the first field that is not allowed."""
    try:
        config = msgspec.convert(json_object("kv_events_config", text), KvEventsConfig)
    except msgspec.ValidationError as error:
        fields = ", ".join(KvEventsConfig.__struct_fields__)
        raise ValueError(f"kv_events_config: {error}; its fields are {fields}") from None
    if config.publisher == "zmq" and not config.enable_kv_cache_events:
        raise ValueError("kv_events_config: publisher is 'zmq', and enable_kv_cache_events false; set it to true")
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        least = 0 if name == "buffer_steps" else 1
        if not least <= (value := getattr(config, name)) <= _MOST_BATCHES:
            raise ValueError(f"kv_events_config: {name} is {value}; it must be {least} to {_MOST_BATCHES}")
    if len(config.topic.encode()) > _MOST_TOPIC_BYTES:
        raise ValueError(f"kv_events_config: topic is longer than {_MOST_TOPIC_BYTES} bytes")
    if config.endpoint == config.replay_endpoint:
        raise ValueError("kv_events_config: endpoint and replay_endpoint are the same; give two")
    for name, endpoint in (("endpoint", config.endpoint), ("replay_endpoint", config.replay_endpoint)):
        if endpoint is not None:
            _check_endpoint(config, name, endpoint)
    return config


def _check_endpoint(config: KvEventsConfig, name: str, endpoint: str) -> None:
    """Raise `ValueError` for an endpoint that is none, or that others can read without leave."""
    if endpoint.startswith("ipc://"):
        try:
            ipc_path(endpoint)
        except AddressError as error:
            raise ValueError(f"kv_events_config: {name}: {error}") from None
        return
    if (match := _TCP.fullmatch(endpoint)) is None or not 1 <= int(match["port"]) <= _LAST_PORT:
        raise ValueError(f"kv_events_config: {name} is {endpoint[:100]!r}; it must be ipc://PATH or tcp://HOST:PORT")
    if match["host"] == "0.0.0.0":  # noqa: S104 - libzmq would connect to it
        raise ValueError(
            f"kv_events_config: {name} is {endpoint}; to bind to all interfaces write tcp://*:{match['port']}"
        )
    if config.is_enabled and not config.insecure_tcp:
        raise ValueError(
            f"kv_events_config: {name} is {endpoint}, which would have the tokens of all prompts and answers in clear "
            "text; use an ipc:// path, or allow it explicitly with insecure_tcp"
        )
