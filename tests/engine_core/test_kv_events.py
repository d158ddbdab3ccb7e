"""KV events of real engines: what subscribers and those who ask for a replay receive, and what is rejected."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from conftest import EngineFactory
from demo_adapters import write_demo_adapter
from patience import PATIENCE

from quire.engine_core import kv_events
from quire.engine_core.kv_events import KvEvents, ZmqPublisher
from quire.frontend import LLM, LoRARequest, SamplingParams
from quire.kernels._native import SamplingConfig, Sequences
from quire.protocol.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventBatch,
    KvEventsConfig,
    parse_kv_events_config,
)

PAGE = 32
STORY = "Once upon a time there was a little girl who lived in a village near the forest, and she was dear to all. "


class VllmEvent(msgspec.Struct, tag=True):
    """Base of the events as subscribers of vLLM decode them."""


class VllmBlockStored(VllmEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class VllmBlockRemoved(VllmEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class VllmAllBlocksCleared(VllmEvent, tag="AllBlocksCleared"):
    pass


class VllmBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[VllmBlockStored | VllmBlockRemoved | VllmAllBlocksCleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """Follows an engine's cache as a router does, by the batches of a socket."""

    def __init__(self, context: zmq.Context[Any], folder: Path, topic: str = "kv@") -> None:
        self.options = {
            "enable_kv_cache_events": True,
            "endpoint": f"ipc://{folder}/events",
            "replay_endpoint": f"ipc://{folder}/replay",
            "topic": "kv@host@demo",
        }
        self.socket = context.socket(zmq.SUB)
        self.socket.subscribe(topic)
        self.socket.connect(self.options["endpoint"])
        self.replay = context.socket(zmq.DEALER)
        self.replay.connect(self.options["replay_endpoint"])
        self.tokens: dict[int, list[int]] = {}  # of a page, by its hash
        self.parents: dict[int, int | None] = {}
        self.next = 0  # number of the next batch
        self.num_batches = 0

    def catch_up(self) -> list[KvEventBatch]:
        """Apply what has come since the last call, as a router does that has missed it."""
        batches = []
        for number, payload in self.replayed(self.next):
            assert number >= self.next
            self.next, self.num_batches = number + 1, self.num_batches + 1
            batches.append(msgspec.msgpack.decode(payload, type=KvEventBatch))
            self.apply(batches[-1])
        return batches

    def apply(self, batch: KvEventBatch) -> None:
        """Apply the events of a batch."""
        for event in batch.events:
            match event:
                case AllBlocksCleared():
                    self.tokens.clear()
                case BlockRemoved():
                    for key in event.block_hashes:
                        del self.tokens[key]
                case BlockStored():
                    parent = event.parent_block_hash
                    for number, key in enumerate(event.block_hashes):
                        assert key not in self.tokens
                        self.tokens[key] = event.token_ids[number * PAGE : (number + 1) * PAGE]
                        self.parents[key], parent = parent, key

    def replayed(self, first: int) -> list[tuple[int, bytes]]:
        """Return the numbers and payloads of a replay."""
        self.replay.send_multipart((b"", first.to_bytes(8, "big")))
        found: list[tuple[int, bytes]] = []
        while True:
            assert self.replay.poll(PATIENCE * 1000)
            empty, _, number, payload = self.replay.recv_multipart()
            assert empty == b""
            if number == (-1).to_bytes(8, "big", signed=True):
                return found
            found.append((int.from_bytes(number, "big"), payload))

    def path(self, key: int | None) -> list[int]:
        """Return all tokens up to the end of a page."""
        return [] if key is None else [*self.path(self.parents[key]), *self.tokens[key]]


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context[Any]()
    yield context
    context.destroy(linger=0)


def test_a_router_knows_what_the_cache_has(
    engine: EngineFactory, demo_model: Path, tmp_path: Path, context: zmq.Context[Any]
) -> None:
    """Prompts, answers, evictions and a reset."""
    router = Subscriber(context, tmp_path)
    llm = engine(demo_model, num_pages=16, kv_events_config=json.dumps(router.options))
    parameters = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    events = []
    for number in range(6):
        (output,) = llm.generate(f"{number} {STORY * 4}", parameters)
        stats = llm.stats()
        events += [event for batch in router.catch_up() for event in batch.events]
        assert len(router.tokens) == stats["pages_cached"]
        assert router.num_batches == stats["kv_event_batches"]
        tokens = [*(output.prompt_token_ids or ()), *output.outputs[0].token_ids]
        num_full = (len(tokens) - 1) // PAGE  # the last token is not computed
        assert tokens[: num_full * PAGE] in [router.path(key) for key in router.tokens]
    assert {type(event) for event in events} == {AllBlocksCleared, BlockStored, BlockRemoved}
    assert [number for number, _ in router.replayed(router.next - 3)] == list(range(router.next - 3, router.next))
    assert llm.reset_prefix_cache()
    llm.generate("x", SamplingParams(max_tokens=1))
    router.catch_up()
    assert not router.tokens


def test_subscribers_receive_what_is_replayed(
    engine: EngineFactory, demo_model: Path, tmp_path: Path, context: zmq.Context[Any]
) -> None:
    """Those of the topic, from when they have connected."""
    subscriber, other = Subscriber(context, tmp_path), Subscriber(context, tmp_path, topic="other")
    llm = engine(demo_model, kv_events_config=json.dumps(subscriber.options))
    deadline, number = time.monotonic() + PATIENCE, 0
    while not subscriber.socket.poll(10) and time.monotonic() < deadline:
        llm.generate(f"{(number := number + 1)} {STORY * 2}", SamplingParams(max_tokens=1))
    topic, place, payload = subscriber.socket.recv_multipart()
    assert topic == b"kv@host@demo"
    assert dict(subscriber.replayed(0))[int.from_bytes(place, "big")] == payload
    assert not other.socket.poll(0)


def test_events_are_maps_with_the_names_of_vllm(
    engine: EngineFactory, demo_model: Path, tmp_path: Path, context: zmq.Context[Any]
) -> None:
    subscriber = Subscriber(context, tmp_path)
    llm = engine(demo_model, kv_events_config=json.dumps(subscriber.options))
    llm.generate(STORY * 3, SamplingParams(max_tokens=1))
    (_, cleared), (last, stored) = subscriber.replayed(0)
    for payload in (cleared, stored):
        assert msgspec.msgpack.decode(payload, type=VllmBatch).events
    assert msgspec.msgpack.decode(cleared)[1:] == [[{"type": "AllBlocksCleared"}], 0]
    _, (event,), _ = msgspec.msgpack.decode(stored)
    assert event["type"] == "BlockStored"
    assert event["block_size"] == PAGE
    assert event["parent_block_hash"] is None
    assert len(event["token_ids"]) == PAGE * len(event["block_hashes"])
    assert event["medium"] == "GPU"
    assert llm.generate(STORY * 3, SamplingParams(max_tokens=1), cache_salt="secret")
    _, payload = subscriber.replayed(last + 1)[0]
    assert b"secret" not in payload
    _, (event,), _ = msgspec.msgpack.decode(payload)
    assert len(event["extra_keys"]) == len(event["block_hashes"])


def test_a_new_engine_begins_with_the_pages_that_are_left(
    engine: EngineFactory, demo_model: Path, tmp_path: Path, context: zmq.Context[Any]
) -> None:
    router = Subscriber(context, tmp_path)
    llm = engine(demo_model, kv_events_config=json.dumps(router.options))
    llm.generate(STORY * 4, SamplingParams(max_tokens=1))
    router.catch_up()
    assert router.tokens
    os.kill(llm._engine.engines.ready.engine_pid, signal.SIGKILL)
    llm.generate("x", SamplingParams(max_tokens=1))
    before = dict(router.tokens)
    assert router.catch_up()[0].events == [AllBlocksCleared()]  # numbers of a new engine are greater
    assert router.tokens == before


def test_a_subscriber_that_does_not_read_and_rubbish_hold_nobody_up(
    engine: EngineFactory, demo_model: Path, tmp_path: Path, context: zmq.Context[Any]
) -> None:
    subscriber = Subscriber(context, tmp_path)
    options = {**subscriber.options, "hwm": 1, "buffer_steps": 2, "max_queue_size": 1}
    llm = engine(demo_model, kv_events_config=json.dumps(options))
    for frames in ([b""], [b"x", b"y" * 8], [b"", b""], [b"", b"\xff" * 8, b"z"]):
        subscriber.replay.send_multipart(frames)
    for number in range(5):
        assert llm.generate(f"{number} {STORY * 2}", SamplingParams(max_tokens=40))
    for _ in range(5):
        assert 1 <= len(subscriber.replayed(0)) <= 2
    assert subscriber.replayed((1 << 64) - 1) == []


class SlowPublisher:
    """Keeps batches, and is full when it is told so."""

    def __init__(self) -> None:
        self.batches: list[KvEventBatch] = []
        self.is_full = False

    def put(self, batch: KvEventBatch) -> None:
        self.batches.append(batch)

    def stop(self) -> bool:
        return True

    def stats(self) -> dict[str, float]:
        return {}


def test_changes_wait_while_the_publisher_is_full() -> None:
    """None is lost: they come in one batch, without what came and went meanwhile."""
    sequences, publisher = Sequences(8, 2, 10), SlowPublisher()
    wakes: list[None] = []
    feature = KvEvents(sequences, 2, publisher, lambda: wakes.append(None), lambda: 5.0)
    feature.attach([])
    assert publisher.batches == [KvEventBatch(5.0, [AllBlocksCleared()])]
    publisher.is_full = True
    for tokens, evicted in (([1, 2, 3, 4, 5], 2), ([6, 7, 8], 0), ([6, 7, 9, 9, 1], 0)):
        slot = sequences.open(tokens, len(tokens), sampling=SamplingConfig(), cache_salt="")
        sequences.start(slot, len(tokens))
        sequences.share(slot, len(tokens) - 1)
        sequences.close(slot)
        assert sequences.tree.evict(evicted) == evicted
        feature.update()
    assert len(publisher.batches) == 1
    publisher.is_full = False
    feature.update()
    (event,) = publisher.batches[1].events
    assert isinstance(event, BlockStored)
    assert event.token_ids == [6, 7, 9, 9]
    assert not wakes


def test_events_name_the_adapters_of_prefixes() -> None:
    """Those that have names, by the salts of their requests; the base and a client's own salt have none."""
    sequences, publisher = Sequences(64, 2, 10), SlowPublisher()
    adapters = {"tales": "/adapters/tales/", "same": "/adapters/tales"}
    feature = KvEvents(sequences, 2, publisher, lambda: None, adapters=adapters)
    feature.attach([])
    cases = [
        ("", ""),
        ("", "salt"),
        ("/adapters/tales", "\0a"),
        ("/adapters//tales", "\0b"),
        ("/adapters/other", "\0c"),
    ]
    for number, (path, salt) in enumerate([*cases, *cases]):
        tokens = [number] * 5
        slot = sequences.open(tokens, len(tokens), sampling=SamplingConfig(), cache_salt=salt)
        sequences.start(slot, len(tokens))
        request: Any = SimpleNamespace(message=SimpleNamespace(adapter=path), cache_salt=salt)
        if path:
            feature.note_adapter(request)
        sequences.share(slot, 4)
        feature.update()
        sequences.close(slot)
    events = [event for batch in publisher.batches[1:] for event in batch.events]
    names = [event.lora_name for event in events if isinstance(event, BlockStored)]
    assert names == [None, None, "tales", "tales", None] * 2


def test_pages_that_come_from_disk_have_the_name_of_their_adapter(
    demo_model: Path, tmp_path: Path, context: zmq.Context[Any]
) -> None:
    folder = write_demo_adapter(tmp_path / "tales", 1)
    modules, disk, prompt = (f"tales={folder}",), str(tmp_path / "disk"), [4] * 520
    once, long = SamplingParams(max_tokens=1), SamplingParams(max_tokens=400, ignore_eos=True)
    for start in range(2):
        router = Subscriber(context, tmp_path)
        with LLM(
            str(demo_model), num_pages=64, max_num_seqs=1, kv_events_config=json.dumps(router.options), kv_disk=disk,
            lora_modules=modules,
        ) as llm:  # fmt: skip
            requests = [None, LoRARequest("tales", 1, str(folder))]
            _, output = llm.generate([[5], prompt], [long, once], lora_request=requests)
            assert output.num_cached_tokens == 512 * start
            stored = [event for batch in router.catch_up() for event in batch.events if isinstance(event, BlockStored)]
            names = [event.lora_name for event in stored if event.token_ids[0] == prompt[0]]
            assert names == ["tales"] * len(names)
            assert names
            stats = llm.stats()
            assert stats["pages_held"] == 0
            assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]


def test_so_many_salts_of_adapters_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were used last."""
    monkeypatch.setattr(kv_events, "_MOST_SALTS", 2)
    sequences, publisher = Sequences(64, 2, 10), SlowPublisher()
    feature = KvEvents(sequences, 2, publisher, lambda: None, adapters={"tales": "/tales"})
    feature.attach([])
    for salt in ("a", "b", "a", "c"):
        request: Any = SimpleNamespace(message=SimpleNamespace(adapter="/tales"), cache_salt=salt)
        feature.note_adapter(request)
    for number, salt in enumerate("abc"):
        slot = sequences.open([number] * 3, 3, sampling=SamplingConfig(), cache_salt=salt)
        sequences.start(slot, 3)
        sequences.share(slot, 2)
        feature.update()
        sequences.close(slot)
    events = [event for batch in publisher.batches[1:] for event in batch.events]
    assert [event.lora_name for event in events if isinstance(event, BlockStored)] == ["tales", None, "tales"]


def test_many_changes_come_in_several_batches_for_which_the_engine_wakes() -> None:
    sequences, publisher = Sequences(5000, 1, 10), SlowPublisher()
    slot = sequences.open([1] * 4101, 4101, sampling=SamplingConfig(), cache_salt="")
    sequences.start(slot, 4101)
    sequences.share(slot, 4100)
    wakes: list[None] = []
    feature = KvEvents(sequences, 1, publisher, lambda: wakes.append(None))
    feature.attach([])
    for num_batches in (2, 3, 4):
        assert len(publisher.batches) == num_batches
        assert len(wakes) == min(num_batches - 1, 2)
        feature.update()
    events = [event for batch in publisher.batches[1:] for event in batch.events]
    keys = [event.block_hashes for event in events if isinstance(event, BlockStored)]
    assert [len(each) for each in keys] == [2048, 2048, 4]
    assert [event.parent_block_hash for event in events if isinstance(event, BlockStored)] == [
        None, keys[0][-1], keys[1][-1],
    ]  # fmt: skip


def test_the_engine_wakes_when_a_publisher_is_no_longer_full(tmp_path: Path) -> None:
    config = KvEventsConfig(enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/events", max_queue_size=2)
    has_room = threading.Event()
    publisher = ZmqPublisher(config, has_room.set)
    fullness = []
    for _ in range(2):
        fullness.append(publisher.is_full)
        publisher.put(KvEventBatch(0.0, []))
    fullness.append(publisher.is_full)
    publisher.start()
    assert has_room.wait(PATIENCE)
    assert [*fullness, publisher.is_full] == [False, False, True, False]
    assert publisher.stop()


def test_two_engines_do_not_share_an_endpoint(engine: EngineFactory, demo_model: Path, tmp_path: Path) -> None:
    options = json.dumps({"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events"})
    engine(demo_model, kv_events_config=options)
    with pytest.raises(RuntimeError, match=f"ipc://{tmp_path}/events"):
        engine(demo_model, kv_events_config=options)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ("[]", "is not a JSON object"),
        ('{"enable_kv_cache_events": 1}', "Expected `bool`"),
        ('{"publisher": "kafka"}', "publisher"),
        ('{"publisher": "zmq"}', "set it to true"),
        ('{"port": 5}', "its fields are enable_kv_cache_events, publisher, endpoint"),
        ('{"buffer_steps": -1}', "buffer_steps is -1; it must be 0 to"),
        ('{"hwm": 0}', "hwm is 0; it must be 1 to"),
        ('{"endpoint": "inproc://x"}', "it must be ipc://PATH or tcp://HOST:PORT"),
        ('{"enable_kv_cache_events": true}', "allow it explicitly with insecure_tcp"),
        ('{"enable_kv_cache_events": true, "endpoint": "ipc:///x", "replay_endpoint": "tcp://h:1"}', "insecure_tcp"),
        ('{"enable_kv_cache_events": true, "endpoint": "tcp://router:1"}', "insecure_tcp"),
        ('{"endpoint": "tcp://0.0.0.0:5557"}', r"write tcp://\*:5557"),
        ('{"endpoint": "tcp://host"}', "it must be ipc://PATH or tcp://HOST:PORT"),
        ('{"endpoint": "tcp://host:0"}', "it must be ipc://PATH or tcp://HOST:PORT"),
        ('{"endpoint": "ipc://@x"}', "endpoint: "),
        ('{"endpoint": "ipc:///x", "replay_endpoint": "ipc:///x"}', "give two"),
        (json.dumps({"topic": "x" * 257}), "longer than 256 bytes"),
    ],
)
def test_configurations_that_are_rejected(fields: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_kv_events_config(fields)


def test_configurations_that_are_taken() -> None:
    assert not parse_kv_events_config("{}").is_enabled
    assert not parse_kv_events_config('{"enable_kv_cache_events": true, "publisher": "null"}').is_enabled
    fields = '{"enable_kv_cache_events": true, "insecure_tcp": true, "endpoint": "tcp://%s:5557"}'
    assert [parse_kv_events_config(fields % host).binds for host in ("router", "*", "[::]")] == [False, True, True]
    assert parse_kv_events_config('{"enable_kv_cache_events": true, "insecure_tcp": true}').binds
