"""Adapters take turns, whatever reading them takes, and however many there are."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.engine_core import adapter_files
from quire.engine_core.adapters import Adapters, adapter_salt
from quire.engine_core.request import RequestStatus
from quire.engine_core.validation import RejectedError
from quire.kernels.adapters.packing import PackedAdapter
from quire.kernels.errors import MemoryShortageError, ModelError
from quire.kernels.runner import DeviceLostError
from quire.protocol.messages import FinishReason


class Loader:
    """Reads adapters whose folders tell what comes of it; a gate lets none be read before it is open."""

    def __init__(self) -> None:
        self.placed: dict[int, PackedAdapter | None] = {}
        self.reads: list[str] = []
        self.made: list[weakref.ref[PackedAdapter]] = []
        self.gates: dict[str, threading.Event] = {}
        self.turns: dict[str, list[threading.Event]] = {}  # between them a read makes progress
        self.most_in_memory = 1 << 30

    def read_adapter(self, path: Path) -> tuple[str, PackedAdapter]:
        self.reads.append(path.name)
        if path.name in self.gates:
            assert self.gates[path.name].wait(60)
        for turn in self.turns.get(path.name, []):
            assert turn.wait(60)
            compute()
        if sum(each is not None for each in self.placed.values()) >= self.most_in_memory:
            raise MemoryShortageError("it takes too much")
        packed = PackedAdapter(np.zeros(0, np.uint8), [path.name], 0)  # type: ignore[list-item]
        self.made.append(weakref.ref(packed))
        if path.name.startswith("bad"):  # known when all has been read
            raise ModelError("it is bad")
        if path.name == "worse":
            raise ZeroDivisionError
        if path.name == "lost":
            raise DeviceLostError("the GPU is lost")
        return f"digest of {content_of(path) or path.name}", packed

    def set_adapter(self, number: int, packed: PackedAdapter | None) -> None:
        self.placed[number] = packed

    @property
    def num_in_memory(self) -> int:
        return sum(each() is not None for each in self.made)


def content_of(path: Path) -> str:
    config = path / "adapter_config.json"
    return config.read_text() if config.exists() else ""


def compute() -> None:
    """Compute for more than a millisecond."""
    end = time.thread_time() + 0.002
    while time.thread_time() < end:
        pass


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
        self.hangs = False  # looks at files do

    def wake(self) -> None:
        self.wakes += 1

    def ask(self, folder: str, salt: str | None = "", tenant: str = "", like: Any = None) -> Any:
        """Begin a request; one `like` another shares its prompt."""
        other = None if like is None else like.message.request_id
        message = SimpleNamespace(adapter=folder, request_id=str(len(self.asked)), shares_prompt_with=other)
        request: Any = Request(message=message, adapter=0, cache_salt=salt, tenant=tenant, client_id=b"client")
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

    @property
    def is_looking(self) -> bool:
        looks = self.adapters._looks
        return bool(looks._looks or looks._asked)

    def step(self) -> None:
        self.release()
        while self.is_looking and not self.hangs:
            join_threads("quire-adapter-files")
            self.release()

    def release(self) -> None:
        for request, error in self.adapters.take_ready():
            assert request not in self.ended
            if error is not None:
                self.errors[request] = error
                self.adapters.remove(request, FinishReason.ERROR, self.now)
            else:
                assert self.adapters.held_status(request) is None
                self.run(request)
        for request in self.running:
            name: Any = Path(request.message.adapter).name
            placed = self.loader.placed.get(request.adapter)
            assert name == "" or (placed is not None and placed.entries == [name])

    def settle(self) -> None:
        """Step until nothing is read, or can be as long as all requests stay what they are."""
        self.step()
        while self.adapters._reader._current is not None or self.is_looking:
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


def join_threads(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(60)


def join_readers() -> None:
    join_threads("quire-adapters")


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
    second, unsalted = world.ask("a", "salt"), world.ask("a", None)
    world.step()
    assert {second, unsalted} <= world.running
    assert second.cache_salt == adapter_salt("digest of a", "salt")
    assert unsalted.cache_salt is None
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
    world.step()
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


def test_a_lost_gpu_is_no_error_of_the_adapter() -> None:
    world = World(1)
    world.ask("lost")
    with pytest.raises(DeviceLostError):
        world.settle()
    assert not world.errors


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
    assert "reading it has made no progress for 60 s; check its file system" in str(hanging.errors[stuck])
    while other not in hanging.running:  # its thread is another one
        hanging.step()
    again = hanging.ask("hangs")
    hanging.step()
    assert "a read of it, without progress for 60 s, has not ended" in str(hanging.errors[again])
    assert sorted(hanging.loader.reads) == ["a", "hangs"]
    assert not hanging.adapters.stop()
    hanging.loader.gates["hangs"].set()
    join_readers()
    assert hanging.adapters.stop()
    assert hanging.loader.num_in_memory == 1


def test_a_read_that_makes_progress_goes_on_for_as_long_as_it_takes() -> None:
    world, turns = World(1), [threading.Event() for _ in range(5)]
    world.loader.turns["slow"] = turns
    request = world.ask("slow")
    for turn in turns:
        world.now += 50
        world.step()
        assert not world.errors
        before = progress_of(world)
        turn.set()
        while progress_of(world) == before and world.adapters._reader._current is not None:
            world.step()  # until the thread has computed, or ended
    world.settle()
    assert request in world.running


def progress_of(world: World) -> float:
    read = world.adapters._reader._current
    return 0.0 if read is None else read.last_progress


def write_files(folder: Path, content: str) -> str:
    """Write an adapter with a content; return its path."""
    folder.mkdir(exist_ok=True)
    (folder / "new").write_text(content)
    (folder / "new").replace(folder / "adapter_config.json")
    return str(folder)


def test_changed_files_are_another_adapter_for_new_requests(tmp_path: Path) -> None:
    world, path = World(2), write_files(tmp_path / "a", "1")
    first = world.ask(path)
    world.settle()
    (tmp_path / "a" / "checkpoint-100").mkdir()  # which is no file of the adapter
    same = world.ask(path)
    world.settle()
    assert same.adapter == first.adapter
    assert len(world.loader.reads) == 1
    write_files(tmp_path / "a", "2")
    second, third = world.ask(path), world.ask(path)
    world.settle()
    assert world.running == {first, same, second, third}
    assert first.adapter != second.adapter == third.adapter
    assert {each.cache_salt for each in (first, same)} == {adapter_salt("digest of 1", "")}
    assert {each.cache_salt for each in (second, third)} == {adapter_salt("digest of 2", "")}
    assert world.loader.num_in_memory == 2
    assert world.adapters.loaded == {path: 4}
    world.end(first, same)
    world.settle()
    assert world.loader.num_in_memory == 1, "nobody can name the files of before"
    assert world.adapters.loaded == {path: 2}


def test_files_that_change_while_they_are_read_are_read_again(tmp_path: Path) -> None:
    world, path = World(2), write_files(tmp_path / "a", "1")
    gate = world.loader.gates["a"] = threading.Event()
    first = world.ask(path)
    while not world.loader.reads:
        world.step()
    write_files(tmp_path / "a", "2")
    late = world.ask(path)
    world.step()
    assert not world.running
    gate.set()
    world.settle()
    assert world.running == {first, late}
    assert late.cache_salt == adapter_salt("digest of 2", "")
    assert len(world.loader.reads) == 2


def test_a_request_that_shares_a_prompt_has_the_same_files(tmp_path: Path) -> None:
    """It takes over pages, which are of the adapter of before."""
    world, path = World(2), write_files(tmp_path / "a", "1")
    first = world.ask(path)
    waiting = world.ask(path, like=first)
    world.settle()
    write_files(tmp_path / "a", "2")
    sample, other = world.ask(path, like=first), world.ask(path)
    joined = world.ask(path, like=other)
    world.settle()
    assert first.adapter == waiting.adapter == sample.adapter != other.adapter == joined.adapter
    world.end(first, sample)
    assert {waiting, other, joined} == world.running


def test_the_only_number_goes_to_the_changed_files_when_it_is_free(tmp_path: Path) -> None:
    world, path = World(1), write_files(tmp_path / "a", "1")
    first = world.ask(path)
    world.settle()
    write_files(tmp_path / "a", "2")
    second = world.ask(path)
    world.settle()
    assert world.running == {first}
    world.end(first)
    world.settle()
    assert world.running == {second}
    assert second.cache_salt == adapter_salt("digest of 2", "")


def test_an_adapter_whose_folder_is_gone_stays(tmp_path: Path) -> None:
    world, path = World(1), write_files(tmp_path / "a", "1")
    world.end(world.ask(path))
    first = world.ask(path)
    world.settle()
    (tmp_path / "a").rename(tmp_path / "b")
    second = world.ask(path)
    world.settle()
    assert world.running == {first, second}


def world_whose_looks_hang(monkeypatch: pytest.MonkeyPatch) -> tuple[World, threading.Event, list[str]]:
    """Return a world with the adapters `a` and `b`, what lets the looks at `a` go on, and the paths looked at."""
    gate, looks, original = threading.Event(), list[str](), adapter_files.files_of

    def files_of(path: str) -> adapter_files.Files:
        looks.append(path)
        assert path != "a" or gate.wait(60)
        return original(path)

    world = World(2)
    for folder in ("a", "b"):
        world.ask(folder)
        world.settle()
    monkeypatch.setattr(adapter_files, "files_of", files_of)
    world.hangs = True
    return world, gate, looks


def test_a_look_that_hangs_holds_up_its_own_requests_only_and_for_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, gate, looks = world_whose_looks_hang(monkeypatch)
    held = world.ask("a")
    world.step()
    other = world.ask("b")
    while other not in world.running:
        world.step()
    assert held not in world.running
    world.now += 1.1
    world.step()
    assert held in world.running
    again = world.ask("a")
    world.step()
    assert again in world.running, "no other look begins"
    assert looks == ["a", "b"]
    assert not world.adapters.stop()
    gate.set()
    join_threads("quire-adapter-files")
    assert world.adapters.stop()
    last = world.ask("a")
    while last not in world.running:
        world.step()
    assert looks == ["a", "b", "a"]


def test_a_path_that_hangs_takes_one_thread_and_none_from_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world, gate, looks = world_whose_looks_hang(monkeypatch)
    held, behind = world.ask("a"), world.ask("b")
    for _ in range(40):
        world.ask("a")
        world.step()
    assert looks == ["a"]
    world.now += 1.1
    while behind not in world.running:
        world.step()
    assert {held, behind} <= world.running
    assert looks == ["a", "b"]
    gate.set()


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
def test_every_request_runs_or_ends(seed: int, tmp_path: Path) -> None:
    """Also where files change, and by files that are no older than the request."""
    generator, world = random.Random(seed), World(2)
    paths = [write_files(tmp_path / name, f"{name}0") for name in (*"abcde", "bad")]
    least: dict[Any, int] = {}
    for number in range(300):
        action = generator.random()
        if action < 0.4:
            path = generator.choice(paths[:-1]) if generator.random() < 0.9 else paths[-1]
            likely = [each for each in world.asked if each.message.adapter == path and each not in world.ended]
            like = generator.choice([*likely[-2:], None, None])
            request = world.ask(path, tenant=generator.choice(["x", "y"]), like=like)
            if like is None:
                least[request] = int(content_of(Path(path)).strip("abcde"))
        elif action < 0.7 and world.running:
            world.end(generator.choice(sorted(world.running, key=id)))
        elif action < 0.75 and world.asked:
            world.end(generator.choice(world.asked))  # whatever its state
        elif action < 0.8:
            path = generator.choice(paths)
            write_files(Path(path), f"{Path(path).name}{number}")
        world.now += generator.random() / 10
        world.step()
        assert len(world.adapters._loaded) <= 2
        assert world.loader.num_in_memory <= 3
    world.settle()
    while world.running:
        world.end(*world.running)
        world.settle()
    assert set(world.asked) == world.have_run | world.errors.keys() | world.ended
    assert all(Path(request.message.adapter).name == "bad" for request in world.errors)
    digests = {adapter_salt(f"digest of {name}{number}", ""): number for name in "abcde" for number in range(301)}
    assert all(digests[request.cache_salt] >= least[request] for request in world.have_run & least.keys())
    assert all(count == 0 for count in world.adapters.loaded.values())
    assert {*world.adapters._adapters.values()} == {*world.adapters._loaded.values()}
    assert not world.adapters._own
    assert not world.adapters._requests
