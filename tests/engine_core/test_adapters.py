"""Adapters take turns, whatever reading them takes, and however many there are."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.engine_core.adapters import Adapters, adapter_salt
from quire.engine_core.validation import RejectedError
from quire.kernels.adapters.packing import PackedAdapter
from quire.kernels.errors import ModelError
from quire.protocol.messages import FinishReason


class Loader:
    """Reads adapters whose folders tell what comes of it."""

    def __init__(self) -> None:
        self.placed: dict[int, str] = {}
        self.reads: list[str] = []

    def read_adapter(self, path: Path) -> tuple[str, PackedAdapter]:
        self.reads.append(path.name)
        if path.name == "bad":
            raise ModelError("it is bad")
        if path.name == "worse":
            raise ZeroDivisionError
        return f"digest of {path.name}", PackedAdapter(np.zeros(0, np.uint8), [path.name])  # type: ignore[list-item]

    def set_adapter(self, number: int, packed: PackedAdapter) -> None:
        self.placed[number] = str(packed.entries[0])


class World:
    """Adapters, and the requests that name them."""

    def __init__(self, most: int, folders: list[str] | None = None) -> None:
        self.now = 0.0
        self.loader, self.wakes = Loader(), 0
        self.adapters = Adapters(self.loader, most, folders, self.wake, lambda: self.now)
        self.errors: dict[Any, RejectedError] = {}
        self.running: set[Any] = set()

    def wake(self) -> None:
        self.wakes += 1

    def ask(self, folder: str, salt: str | None = "") -> Any:
        request: Any = Request(message=SimpleNamespace(adapter=folder), adapter=0, cache_salt=salt)
        self.adapters.check(request.message)
        self.adapters.begin(request)
        if self.adapters.held_status(request) is None:
            self.running.add(request)
        return request

    def step(self) -> None:
        for request, error in self.adapters.take_ready():
            if error is not None:
                self.errors[request] = error
                self.adapters.remove(request, FinishReason.ERROR, self.now)
            else:
                assert self.adapters.held_status(request) is None
                self.running.add(request)
        for request in self.running:
            assert request.message.adapter == "" or self.loader.placed[request.adapter] == request.message.adapter

    def until(self, condition: Callable[[], bool]) -> None:
        """Step until the thread has done its part."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            self.step()

    def end(self, request: Any) -> None:
        self.running.discard(request)
        self.adapters.remove(request, FinishReason.STOP, self.now)


class Request(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def test_requests_wait_for_their_adapter_alone() -> None:
    world = World(2)
    base, first, bad, worse = (world.ask(folder) for folder in ("", "a", "bad", "worse"))
    assert world.running == {base}
    world.until(lambda: first in world.running and {bad, worse} <= world.errors.keys())
    assert str(world.errors[bad]) == "adapter='bad' can't be used: it is bad"
    assert "ZeroDivisionError" in str(world.errors[worse])
    assert (first.cache_salt, base.cache_salt) == (adapter_salt("digest of a", ""), "")
    second = world.ask("a", "salt")
    assert second in world.running
    assert second.cache_salt == adapter_salt("digest of a", "salt")
    assert world.ask("a", None).cache_salt is None
    assert world.loader.reads.count("a") == 1
    world.until(lambda: world.ask("bad") in world.errors or "bad" in world.loader.reads[3:])  # maybe it is mended


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


def test_an_adapter_waits_for_one_that_is_not_in_use_and_others_wait_behind_it() -> None:
    world = World(1)
    first, second = world.ask("a"), world.ask("b")
    world.until(lambda: first in world.running and "b" in world.loader.reads)
    time.sleep(0.01)
    world.step()
    assert second not in world.running
    again = world.ask("a")
    assert again in world.running  # as yet
    world.now += 2
    late = world.ask("a")
    world.step()
    assert late not in world.running
    for request in (first, again):
        world.end(request)
    assert world.wakes > 2
    world.until(lambda: second in world.running)
    assert late not in world.running
    world.end(second)
    world.until(lambda: late in world.running)
    assert world.loader.reads == ["a", "b"]  # it was kept, as a request waited for it


def test_the_least_recently_named_adapter_leaves() -> None:
    world = World(2)
    for folder in ("a", "b", "a", "c"):
        request = world.ask(folder)
        world.until(lambda request=request: request in world.running)  # type: ignore[misc]
        world.end(request)
    assert {*world.adapters.loaded} == {"a", "c"}


@pytest.mark.parametrize("seed", range(20))
def test_every_request_runs_or_ends(seed: int) -> None:
    generator, world = random.Random(seed), World(2)
    asked: list[Any] = []
    for _ in range(300):
        action = generator.random()
        if action < 0.4:
            asked.append(world.ask(generator.choice("abcde") if generator.random() < 0.9 else "bad"))
        elif action < 0.7 and world.running:
            world.end(generator.choice(sorted(world.running, key=id)))
        elif action < 0.8 and asked:
            world.end(generator.choice(asked))  # whatever its state
        world.now += generator.random() / 2
        world.step()
        assert len(world.adapters.loaded) <= 2

    def all_have_run() -> bool:
        for request in [*world.running]:
            world.end(request)
        return not any(is_open(world, request) for request in asked)

    world.until(all_have_run)
    assert all(count == 0 for count in world.adapters.loaded.values())


def is_open(world: World, request: Any) -> bool:
    adapter = world.adapters._adapters.get(request.message.adapter)
    return adapter is not None and (request in adapter.waiting or request in adapter.users)
