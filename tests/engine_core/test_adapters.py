"""Adapters take turns, whatever reading them takes, and however many there are."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.engine_core.adapters import Adapters, adapter_salt
from quire.engine_core.request import RequestStatus
from quire.engine_core.validation import RejectedError
from quire.kernels.adapters.packing import PackedAdapter
from quire.kernels.errors import MemoryShortageError, ModelError
from quire.protocol.messages import FinishReason


class Loader:
    """Reads adapters whose folders tell what comes of it; a gate lets none be read before it is open."""

    def __init__(self) -> None:
        self.placed: dict[int, PackedAdapter | None] = {}
        self.reads: list[str] = []
        self.made: list[weakref.ref[PackedAdapter]] = []
        self.gates: dict[str, threading.Event] = {}
        self.most_in_memory = 1 << 30

    def read_adapter(self, path: Path) -> tuple[str, PackedAdapter]:
        self.reads.append(path.name)
        if path.name in self.gates:
            assert self.gates[path.name].wait(60)
        if sum(each is not None for each in self.placed.values()) >= self.most_in_memory:
            raise MemoryShortageError("it takes too much")
        packed = PackedAdapter(np.zeros(0, np.uint8), [path.name], 0)  # type: ignore[list-item]
        self.made.append(weakref.ref(packed))
        if path.name.startswith("bad"):  # known when all has been read
            raise ModelError("it is bad")
        if path.name == "worse":
            raise ZeroDivisionError
        return f"digest of {path.name}", packed

    def set_adapter(self, number: int, packed: PackedAdapter | None) -> None:
        self.placed[number] = packed

    @property
    def num_in_memory(self) -> int:
        return sum(each() is not None for each in self.made)


class World:
    """Adapters, and the requests that name them."""

    def __init__(self, max_loras: int, folders: list[str] | None = None) -> None:
        self.now = 0.0
        self.loader, self.wakes = Loader(), 0
        self.max_loras = max_loras
        self.adapters = Adapters(self.loader, max_loras, folders, self.wake, lambda: self.now)
        self.asked: list[Any] = []
        self.errors: dict[Any, RejectedError] = {}
        self.running: set[Any] = set()
        self.have_run: set[Any] = set()
        self.ended: set[Any] = set()

    def wake(self) -> None:
        self.wakes += 1

    def ask(self, folder: str, salt: str | None = "", tenant: str = "") -> Any:
        request: Any = Request(message=SimpleNamespace(adapter=folder), adapter=0, cache_salt=salt, tenant=tenant)
        self.adapters.check(request.message)
        self.adapters.begin(request)
        self.asked.append(request)
        if self.adapters.held_status(request) is None:
            self.run(request)
        else:
            assert self.adapters.held_status(request) is RequestStatus.WAITING_FOR_ADAPTER
        return request

    def run(self, request: Any) -> None:
        assert request not in self.have_run
        self.running.add(request)
        self.have_run.add(request)

    def step(self) -> None:
        for request, error in self.adapters.take_ready():
            assert request not in self.ended
            if error is not None:
                self.errors[request] = error
                self.adapters.remove(request, FinishReason.ERROR, self.now)
            else:
                assert self.adapters.held_status(request) is None
                self.run(request)
        for request in self.running:
            name = request.message.adapter.strip("/.")
            placed = self.loader.placed.get(request.adapter)
            assert name == "" or (placed is not None and placed.entries == [name])

    def settle(self) -> None:
        """Step until nothing is read, or can be as long as all requests stay what they are."""
        self.step()
        while self.adapters._reader._current is not None:
            join_readers()
            self.step()
            assert self.loader.num_in_memory <= self.max_loras + 1

    def end(self, *requests: Any) -> None:
        for request in requests:
            self.running.discard(request)
            self.ended.add(request)
            self.adapters.remove(request, FinishReason.STOP, self.now)


class Request(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def join_readers() -> None:
    for thread in threading.enumerate():
        if thread.name == "quire-adapters":
            thread.join(60)


@pytest.fixture
def hanging() -> Iterator[World]:
    """A world with one number, in which reading the folder `hangs` does so."""
    world = World(1)
    world.loader.gates["hangs"] = threading.Event()
    yield world
    world.loader.gates["hangs"].set()
    join_readers()


def test_requests_wait_for_their_adapter_alone() -> None:
    world = World(2)
    base, first, bad, worse = (world.ask(folder) for folder in ("", "a", "bad", "worse"))
    assert world.running == {base}
    world.settle()
    assert world.running == {base, first}
    assert str(world.errors[bad]) == "adapter='bad' can't be used: it is bad"
    assert "ZeroDivisionError" in str(world.errors[worse])
    assert (first.cache_salt, base.cache_salt) == (adapter_salt("digest of a", ""), "")
    second = world.ask("a", "salt")
    assert second in world.running
    assert second.cache_salt == adapter_salt("digest of a", "salt")
    assert world.ask("a", None).cache_salt is None
    assert world.loader.reads == ["a", "bad", "worse"]


def test_all_spellings_of_a_path_are_one_adapter() -> None:
    world = World(4, ["/a//b"])
    for path in ("/a/b", "/a//b", "//a/b", "/a/./b/", "/a/c/../b"):
        world.ask(path)
    assert list(world.adapters._adapters) == ["/a/b"]


def test_the_salts_of_adapters_are_theirs_alone() -> None:
    cases = [("a", ""), ("a", "b"), ("b", ""), ("a", "b" * 1024), ("ab", "")]
    salts = {adapter_salt(digest, salt) for digest, salt in cases}
    assert len(salts) == len(cases)
    assert {(len(salt), salt[0]) for salt in salts} == {(65, "\0")}


def test_only_the_named_folders_are_read() -> None:
    world = World(2, ["/a"])
    with pytest.raises(RejectedError, match="adapter='/b' is not one of this engine; name one of its lora_modules"):
        world.ask("/b")
    world.ask("/a")
    world.ask("")


def test_an_adapter_waits_for_one_that_is_not_in_use_and_new_requests_of_that_wait_behind_it() -> None:
    world = World(1)
    first, second = world.ask("a"), world.ask("b")
    world.settle()
    assert world.running == {first}
    assert world.loader.reads == ["a", "b"]
    again = world.ask("a")
    assert again in world.running  # as yet
    world.now += 2
    world.step()
    late = world.ask("a")
    world.step()
    assert late not in world.running
    wakes = world.wakes
    world.end(first, again)
    assert world.wakes > wakes
    world.settle()
    assert world.running == {second}
    world.end(second)
    world.settle()
    assert world.running == {late}
    assert world.loader.reads == ["a", "b", "a"]


def test_only_one_adapter_is_held_for_one_that_waits() -> None:
    """It is the one with the fewest users, and of these the least recently named."""
    world = World(3)
    for folder in ("a", "a", "b", "c"):
        world.ask(folder)
    world.settle()
    assert len(world.running) == 4
    ninth = world.ask("d")
    world.settle()
    world.now += 2
    world.step()
    held, others = world.ask("b"), [world.ask(folder) for folder in ("a", "c", "", "c")]
    world.now += 100
    world.step()
    assert held not in world.running
    assert world.running.issuperset(others)
    for request in [each for each in world.running if each.message.adapter == "a"]:
        world.end(request)
    world.settle()
    assert {ninth, held} <= world.running  # the number of "a" came free first, so that "b" keeps its own


def test_an_adapter_that_has_lost_its_number_is_read_again_in_its_turn() -> None:
    """It is not kept for the requests that wait for it: `settle` counts."""
    world = World(1)
    first, second, third = (world.ask(folder) for folder in "abc")
    world.settle()
    world.now += 2
    world.step()
    held = world.ask("a")
    for ending, running in ((first, second), (second, third), (third, held)):
        world.end(ending)
        world.settle()
        assert world.running == {running}
    assert world.loader.reads == ["a", "b", "c", "a"]


def test_the_victim_goes_on_when_nobody_waits_for_its_number() -> None:
    world = World(1)
    first, second = world.ask("a"), world.ask("b")
    world.settle()
    world.now += 2
    world.step()
    held = world.ask("a")
    assert held not in world.running
    world.end(second)
    world.step()
    assert world.running == {first, held}


def test_many_adapters_wait_as_names() -> None:
    """Of those that have no number one is in memory at most: `settle` counts."""
    world = World(8)
    requests = [world.ask(f"a{number}") for number in range(100)]
    world.settle()
    assert world.running == set(requests[:8])
    assert world.loader.num_in_memory == 9
    assert len(world.loader.reads) == 9
    for request in requests:
        assert request in world.running
        world.end(request)
        world.settle()
    assert world.loader.reads == [f"a{number}" for number in range(100)]
    assert world.loader.num_in_memory == 8


def test_what_nobody_waits_for_is_not_read() -> None:
    world = World(1)
    requests = [world.ask(folder) for folder in ("a", "b", "c", "d")]
    world.settle()
    world.end(*requests[1:3])
    world.settle()
    assert world.loader.reads == ["a", "b", "d"]
    assert world.loader.num_in_memory == 2
    world.end(*requests)
    world.settle()
    assert set(world.adapters._adapters) == {"a"}


def test_a_read_ends_though_its_requests_have(hanging: World) -> None:
    request, other = hanging.ask("hangs"), hanging.ask("b")
    hanging.end(request)
    again = hanging.ask("hangs")
    hanging.end(again)
    hanging.step()
    assert hanging.running == set()
    hanging.loader.gates["hangs"].set()
    hanging.settle()
    assert hanging.running == {other}
    assert hanging.loader.reads == ["hangs", "b"]
    assert hanging.loader.num_in_memory == 1


def test_a_bad_adapter_ends_its_requests_whatever_is_in_use() -> None:
    world = World(1)
    first, blocked, bad = (world.ask(folder) for folder in ("a", "b", "bad"))
    world.settle()
    assert world.running == {first}
    world.end(blocked)  # which is in memory, and leaves
    world.settle()
    assert bad in world.errors
    assert world.running == {first}
    other = world.ask("c")
    world.settle()
    world.end(first)
    world.settle()
    assert world.running == {other}


def test_tenants_take_turns() -> None:
    world = World(2)
    flood = [world.ask(f"bad{number}", tenant="flood") for number in range(50)]
    other = world.ask("a", tenant="other")
    world.settle()
    assert other in world.running
    assert set(flood) == set(world.errors)
    assert world.loader.reads.index("a") <= 2


def test_groups_of_tenants_take_turns_before_their_tenants_do() -> None:
    world = World(9)
    for tenant in ("first", "x/1", "x/1", "x/2", "y"):
        world.ask(f"a{len(world.asked)}", tenant=tenant)
    world.settle()
    assert world.loader.reads == ["a0", "a1", "a4", "a3", "a2"]


def test_a_read_that_hangs_is_an_error_and_others_go_on(hanging: World) -> None:
    stuck, other = hanging.ask("hangs"), hanging.ask("a")
    while not hanging.loader.reads:  # its thread has begun
        hanging.step()
    assert not hanging.errors
    hanging.now += 61
    hanging.step()
    error = str(hanging.errors[stuck])
    assert "reading and packing it has taken more than 60 s; put it on a faster disk" in error
    while other not in hanging.running:  # its thread is another one
        hanging.step()
    again = hanging.ask("hangs")
    hanging.step()
    assert "a read of it has not ended after more than 60 s" in str(hanging.errors[again])
    assert sorted(hanging.loader.reads) == ["a", "hangs"]
    assert not hanging.adapters.stop()
    hanging.loader.gates["hangs"].set()
    join_readers()
    assert hanging.adapters.stop()
    assert hanging.loader.num_in_memory == 1


def test_an_error_is_remembered_until_the_files_change(tmp_path: Path) -> None:
    world, folder = World(1), tmp_path / "bad"
    folder.mkdir()

    def num_reads() -> int:
        request = world.ask(str(folder))
        world.settle()
        assert str(world.errors[request]) == f"adapter={str(folder)!r} can't be used: it is bad"
        return len(world.loader.reads)

    assert [num_reads() for _ in range(3)] == [1, 1, 1]
    (folder / "adapter_config.json").write_text("{}")
    assert num_reads() == 2
    world.now += 9
    assert num_reads() == 2
    world.now += 2
    assert num_reads() == 3


def test_the_least_recently_named_adapter_leaves() -> None:
    world = World(2)
    for folder in ("a", "b", "a", "c"):
        request = world.ask(folder)
        world.settle()
        assert request in world.running
        world.end(request)
    assert {*world.adapters.loaded} == {"a", "c"}


def test_adapters_leave_where_there_is_too_little_memory_for_another() -> None:
    world = World(3)
    world.loader.most_in_memory = 2
    for folder in ("a", "b", "c"):
        request = world.ask(folder)
        world.settle()
        assert request in world.running
        if folder == "b":
            world.end(*world.running)
    assert {*world.adapters.loaded} == {"b", "c"}, "the least recently named one has left, and no other"
    assert world.loader.reads == ["a", "b", "c", "c"]
    world.ask("d")
    world.settle()
    assert {*world.adapters.loaded} == {"c", "d"}
    refused = world.ask("e")
    world.settle()
    assert str(world.errors[refused]) == "adapter='e' can't be used: it takes too much"
    world.end(*world.running)
    late = world.ask("e")
    world.settle()
    assert late in world.running
    assert {*world.adapters.loaded} == {"d", "e"}
    world.end(late)
    world.loader.most_in_memory, world.loader.reads = 1, []
    large = world.ask("f")
    world.settle()
    assert ([*world.adapters.loaded], world.loader.reads) == (["f"], ["f"] * 3), "one has left after the other"
    world.end(large)
    world.adapters.evict()
    assert not world.adapters.loaded
    assert world.loader.num_in_memory == 0


@pytest.mark.parametrize("seed", range(20))
def test_every_request_runs_or_ends(seed: int) -> None:
    generator, world = random.Random(seed), World(2)
    for _ in range(300):
        action = generator.random()
        if action < 0.4:
            folder = generator.choice("abcde") if generator.random() < 0.9 else "bad"
            world.ask(folder, tenant=generator.choice(["x", "y"]))
        elif action < 0.7 and world.running:
            world.end(generator.choice(sorted(world.running, key=id)))
        elif action < 0.8 and world.asked:
            world.end(generator.choice(world.asked))  # whatever its state
        world.now += generator.random() / 10
        world.step()
        assert len(world.adapters.loaded) <= 2
        assert world.loader.num_in_memory <= 3
    world.settle()
    while world.running:
        world.end(*world.running)
        world.settle()
    assert set(world.asked) == world.have_run | world.errors.keys() | world.ended
    assert all(request.message.adapter == "bad" for request in world.errors)
    assert all(count == 0 for count in world.adapters.loaded.values())
    assert world.adapters._adapters.keys() == world.adapters.loaded.keys()
