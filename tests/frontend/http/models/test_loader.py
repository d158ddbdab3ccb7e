"""The loader of models, with services that take no time: which are loaded and unloaded, and when."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from patience import PATIENCE

from quire.frontend.errors import EngineDeadError
from quire.frontend.http.errors import ApiError
from quire.frontend.http.models.loader import LoadPolicy, ModelLoader
from quire.frontend.http.models.served_model import ModelState, ServedModel
from quire.frontend.metrics.server import ServerMetrics

NAMES = ("a", "b", "c")


class FakeService:
    """A service without an engine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_closed = False
        self.died: asyncio.Future[EngineDeadError] | None = None
        self.llm: Any = self
        self.engine_address = "ipc:///nowhere"

    async def warm_up(self) -> None:
        pass

    def facts(self) -> None:
        pass

    async def wait_dead(self) -> EngineDeadError:
        self.died = asyncio.get_running_loop().create_future()
        return await self.died

    def close(self) -> None:
        self.is_closed = True


class Scene:
    """Models a, b and c, and a clock that is set by hand. `broken`: those that fail to load."""

    def __init__(self, **policy: Any) -> None:
        self.now = 0.0
        self.broken: set[str] = set()
        self.opened: list[str] = []
        self.services: list[FakeService] = []
        self.models = [ServedModel([name], name, ServerMetrics(model_name=name), self.opener(name)) for name in NAMES]
        self.loader = ModelLoader(self.models, LoadPolicy(**policy), lambda: self.now)

    def opener(self, name: str) -> Callable[[], Any]:
        def open_service() -> FakeService:
            self.opened.append(name)
            if name in self.broken:
                raise ValueError(f"{name} is broken\nand this is a detail")
            self.services.append(FakeService(name))
            return self.services[-1]

        return open_service

    @property
    def loaded(self) -> str:
        return "".join(sorted(model.name for model in self.models if model.service is not None))

    async def use(self, *names: str) -> None:
        """Hold each model for a moment, one after the other."""
        for name in names:
            model = self.model(name)
            await self.loader.hold(model)
            self.now += 1
            self.loader.release(model)

    def model(self, name: str) -> ServedModel:
        return self.models[NAMES.index(name)]


def play(scene: Scene, body: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE):
            await body(scene)
            await scene.loader.close()
            assert scene.loaded == ""
            assert all(service.is_closed for service in scene.services)

    asyncio.run(main())


async def turns(number: int = 20) -> None:
    """Let all that can go on do so."""
    for _ in range(number):
        await asyncio.sleep(0)


async def until(is_so: Callable[[], object]) -> None:
    while not is_so():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0)


def test_the_least_recently_used_model_makes_room() -> None:
    async def body(scene: Scene) -> None:
        await scene.use("a", "b", "a", "c")
        assert scene.loaded == "ac"
        await scene.use("b")
        assert scene.loaded == "bc"
        assert scene.opened == ["a", "b", "c", "b"]

    play(Scene(max_loaded=2), body)


def test_a_model_that_does_not_fit_besides_the_others_gets_their_room() -> None:
    async def body(scene: Scene) -> None:
        await scene.use("a", "b", "c")
        assert scene.loaded == "c"

    scene = Scene(fits=lambda model: model.name != "c")
    play(scene, body)


def test_a_model_that_is_held_stays_and_requests_that_wait_for_its_room_have_their_turn() -> None:
    async def body(scene: Scene) -> None:
        a = scene.model("a")
        held = await scene.loader.hold(a)
        order: list[str] = []

        async def use(name: str) -> None:
            model = scene.model(name)
            await scene.loader.hold(model)
            order.append(name)
            scene.loader.release(model)

        tasks = []
        for name in ("b", "a", "c"):  # that for a comes after the one for b, which it would keep waiting
            tasks.append(asyncio.create_task(use(name)))
            await until(lambda: a.makes_room)
            await turns()
        assert (scene.loaded, order, held.is_closed) == ("a", [], False)
        scene.loader.release(a)
        await asyncio.gather(*tasks)
        assert order == ["b", "a", "c"]

    play(Scene(max_loaded=1), body)


def test_one_model_at_a_time_makes_room_though_another_was_used_later() -> None:
    async def body(scene: Scene) -> None:
        a, c = scene.model("a"), scene.model("c")
        for model in (a, a, c):
            scene.now += 1
            await scene.loader.hold(model)
        waiting = asyncio.create_task(scene.use("b"))
        await until(lambda: a.makes_room)
        scene.now += 1
        scene.loader.release(a)  # one of its two, so that it was used after c
        await turns()
        assert (a.makes_room, c.makes_room) == (True, False)
        scene.loader.release(a)
        await waiting
        assert scene.loaded == "bc"

    play(Scene(max_loaded=2), body)


def test_one_load_serves_all_who_wait_and_no_one_takes_the_room_before_they_had_it() -> None:
    async def body(scene: Scene) -> None:
        await asyncio.gather(*(scene.use(name) for name in "abcabcabc"))
        assert sorted(scene.opened) == ["a", "b", "c"]

    play(Scene(max_loaded=1), body)


def test_a_request_that_leaves_is_not_loaded_for_and_holds_nothing() -> None:
    async def body(scene: Scene) -> None:
        a = scene.model("a")
        await scene.loader.hold(a)
        waiting = asyncio.create_task(scene.loader.hold(scene.model("b")))
        await until(lambda: a.makes_room)
        waiting.cancel()
        await until(lambda: scene.model("b").loading is None)
        assert not a.makes_room
        assert (scene.opened, scene.loaded) == (["a"], "a")
        scene.loader.release(a)
        await scene.use("b")
        assert scene.model("b").num_open == 0

    play(Scene(max_loaded=1), body)


def test_a_load_that_fails_is_tried_again_after_ever_longer_pauses() -> None:
    async def body(scene: Scene) -> None:
        await scene.use("b")
        for pause in (2, 4, 8, 16, 32, 60, 60):
            with pytest.raises(ApiError) as error:
                await scene.use("a")
            assert (error.value.status, error.value.headers["Retry-After"]) == (503, str(pause))
            assert "a is broken; the next try" in error.value.message
            tries = len(scene.opened)
            scene.now += pause - 0.5
            with pytest.raises(ApiError):
                await scene.use("a")
            assert len(scene.opened) == tries
            scene.now += 0.5
        assert scene.loaded == "b"
        scene.broken.clear()
        await scene.use("a")
        assert scene.model("a").failure is None

    scene = Scene()
    scene.broken = {"a"}
    play(scene, body)


def test_none_makes_room_for_a_model_that_can_not_be_loaded() -> None:
    def fits(model: ServedModel) -> bool:
        if model.name == "b":
            raise ValueError("b has no weights")
        return True

    async def body(scene: Scene) -> None:
        await scene.use("a")
        with pytest.raises(ApiError, match="b has no weights"):
            await scene.use("b")
        assert scene.loaded == "a"

    play(Scene(max_loaded=1, fits=fits), body)


def test_a_model_that_is_idle_sleeps_and_what_a_request_says_of_its_time_counts_until_the_next_one() -> None:
    async def body(scene: Scene) -> None:
        a = scene.model("a")
        await scene.use("a")
        assert math.isinf(scene.loader.seconds_left(a))
        await scene.loader.hold(a)
        scene.loader.release(a, 90)
        scene.now += 30
        assert scene.loader.seconds_left(a) == 60
        await scene.loader.hold(a)
        scene.loader.release(a, 0.0)
        await until(lambda: a.state is ModelState.SLEEPING)
        await scene.use("a")
        assert scene.opened == ["a", "a"]

    play(Scene(), body)


def test_a_model_is_unloaded_once_it_is_idle_unless_new_requests_come() -> None:
    async def body(scene: Scene) -> None:
        a = scene.model("a")
        await scene.loader.hold(a)
        scene.loader.unload(a)
        await turns()
        assert a.state is ModelState.LOADED
        scene.loader.release(a)
        await until(lambda: a.state is ModelState.UNLOADED)
        await scene.loader.hold(a)
        scene.loader.unload(a)
        await scene.use("a")
        scene.loader.release(a)
        await turns()
        assert a.state is ModelState.LOADED

    play(Scene(), body)


def test_a_model_that_is_unloaded_while_it_loads_does_not_stay() -> None:
    async def body(scene: Scene) -> None:
        a, b = scene.model("a"), scene.model("b")
        scene.loader.load(a)
        await until(lambda: a.state is ModelState.LOADING)
        scene.loader.unload(a)
        await until(lambda: a.state is ModelState.UNLOADED)
        assert scene.opened == ["a"]
        waiting = asyncio.create_task(scene.loader.hold(a))
        await until(lambda: a.state is ModelState.LOADING)
        scene.loader.unload(a)
        await waiting  # it came before that
        scene.loader.load(b)
        await until(lambda: a.makes_room)
        scene.loader.unload(b)
        await until(lambda: b.loading is None)
        scene.loader.release(a)
        await until(lambda: a.state is ModelState.UNLOADED)
        assert scene.opened == ["a", "a"]

    play(Scene(max_loaded=1), body)


def test_an_engine_that_dies_for_good_is_the_end_of_its_model_alone() -> None:
    async def body(scene: Scene) -> None:
        await scene.use("a", "b")
        await until(lambda: scene.services[0].died is not None)
        assert scene.services[0].died is not None
        scene.services[0].died.set_result(EngineDeadError("the engine was killed"))
        await until(lambda: scene.loaded == "b")
        with pytest.raises(ApiError, match="the engine was killed"):
            await scene.use("a")
        scene.now += 2
        await scene.use("a")
        assert scene.loaded == "ab"

    play(Scene(), body)


def test_a_server_that_closes_waits_for_no_room() -> None:
    async def body(scene: Scene) -> None:
        await scene.loader.hold(scene.model("a"))
        scene.loader.load(scene.model("b"))
        await turns()
        scene.model("a").num_open = 0  # its request was cut off

    play(Scene(max_loaded=1), body)
