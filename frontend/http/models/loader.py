"""Loads the models of a server and unloads them: one at a time, off the event loop, and never under a request."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from quire.frontend.errors import EngineDeadError
from quire.frontend.http.errors import ApiError
from quire.frontend.http.models.served_model import LoadFailure, ModelState, ServedModel
from quire.frontend.http.service import ModelService
from quire.protocol.resident_memory import trim_heap

logger = logging.getLogger(__name__)

_FIRST_PAUSE = 2.0  # seconds between a failed load and the next try, doubled by each further failure
_LONGEST_PAUSE = 60.0
_FOR_EVER = 1e9  # seconds of idleness; more are not counted

OnOpen = Callable[[ServedModel, ModelService], None]


@dataclass(frozen=True, kw_only=True)
class LoadPolicy:
    """When models are loaded and unloaded.

    `max_loaded`: most models that are loaded at once. `fits`: returns whether the memory that is free holds a model
    besides those that are loaded, or raises an exception if it can't be loaded at all; called on another thread.
    `keep_seconds`: seconds of idleness after which a model is unloaded, unless a request says otherwise.
    `stop_loading`: makes loads that are in progress fail soon.
    """

    max_loaded: int | None = None
    fits: Callable[[ServedModel], bool] = lambda _model: True
    keep_seconds: float = math.inf
    stop_loading: Callable[[], None] = lambda: None


class ModelLoader:
    """Loads and unloads `models`, one at a time in the order of the requests. All methods run on one event loop.

    To make room for a model, the one that was used least recently is unloaded, among those that are idle if there is
    one. Else new requests for it wait until its open ones have ended and the other model has been loaded, so that
    neither waits for ever. `clock`: seconds.
    """

    def __init__(
        self, models: Sequence[ServedModel], policy: LoadPolicy, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.policy = policy
        self._models = models
        self._clock = clock
        self._turn = asyncio.Lock()  # of the load or unload that is in progress
        self._changed = asyncio.Event()  # set when a model may have become idle, or nobody waits for one any more
        self.dead_error: EngineDeadError | None = None  # of the only model
        self._died = asyncio.Event()
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_open: list[OnOpen] = []
        for model in models:
            model.keep_seconds = policy.keep_seconds

    @property
    def loaded(self) -> list[ServedModel]:
        """The loaded models, the least recently used first."""
        return sorted((model for model in self._models if model.service is not None), key=lambda model: model.last_used)

    def on_open(self, note: OnOpen) -> None:
        """Call `note` for each model that is loaded, now and whenever one is."""
        self._on_open.append(note)
        for model in self.loaded:
            if model.service is not None:
                note(model, model.service)

    async def start(self) -> None:
        """Watch the engines that are there, and prepare for their first chats."""
        for model in self.loaded:
            if model.service is not None:
                await model.service.warm_up()
                model.known = model.service.facts()
                self._watch(model, model.service)
                self._expire_after(model, self.policy.keep_seconds)

    async def wait_dead(self) -> None:
        """Wait until the engine of the only model has died."""
        await self._died.wait()

    async def hold(self, model: ServedModel) -> ModelService:
        """Return the service of a model, which is loaded if need be, and stays loaded until `release`.

        Raises `ApiError` 503 if it cannot be loaded.
        """
        model.is_unwanted = False
        if model.service is not None and not model.makes_room:
            self._begin(model)
            return model.service
        self._start_load(model)
        waiter: asyncio.Future[ModelService] = asyncio.get_running_loop().create_future()
        model.waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(model, model.keep_seconds)
            elif waiter in model.waiters:
                model.waiters.remove(waiter)
            raise
        finally:
            self._changed.set()

    def release(self, model: ServedModel, keep_seconds: float | None = None) -> None:
        """Let go of a model, which is unloaded after so many seconds of idleness, None for those of the policy."""
        model.num_open -= 1
        model.last_used = self._clock()
        self._changed.set()
        self._expire_idle(model, keep_seconds)

    def load(self, model: ServedModel) -> None:
        """Begin to load a model for a client that does not wait. Raises `ApiError` 503 if that failed just now."""
        self._start_load(model)
        model.is_wanted, model.is_unwanted = True, False

    def unload(self, model: ServedModel) -> None:
        """Unload a model once its open requests have ended, unless new ones come before that.

        One that is being loaded is unloaded after that; its load does not begin if no request waits for it.
        """
        model.is_wanted, model.is_unwanted = False, True
        self._changed.set()
        self._expire_after(model, 0.0, ModelState.UNLOADED)

    def seconds_left(self, model: ServedModel) -> float:
        """Return the seconds after which a model will be unloaded if no further request comes."""
        if model.open is None or model.keep_seconds >= _FOR_EVER:
            return math.inf
        idle = 0.0 if model.num_open else self._clock() - model.last_used
        return max(0.0, model.keep_seconds - idle)

    async def close(self) -> None:
        """Unload all models, and give up on those that are being loaded."""
        self._is_closing = True
        self.policy.stop_loading()
        self._changed.set()
        for task in [*self._tasks, *(model.loading for model in self._models if model.loading is not None)]:
            with suppress(Exception):
                await task
        services = [self._leave(model) for model in self.loaded]
        await asyncio.gather(*(asyncio.to_thread(service.close) for service in services))

    def failed(self, model: ServedModel, failure: LoadFailure) -> ApiError:
        """Return the error of requests for a model that could not be loaded."""
        seconds = max(1, math.ceil(failure.retry_at - self._clock()))
        return ApiError(
            503,
            f"the model {model.name} could not be loaded: {failure.reason}; the next try may be in {seconds} s",
            code="model_not_loaded",
            headers={"Retry-After": str(seconds)},
        )

    def _begin(self, model: ServedModel) -> None:
        model.num_open += 1
        model.last_used = self._clock()
        self._cancel_expiry(model)

    def _start_load(self, model: ServedModel) -> None:
        """Start the task that loads a model, if there is none. Raises `ApiError` 503 if that failed just now."""
        if model.loading is not None:
            return
        if model.failure is not None and self._clock() < model.failure.retry_at:
            raise self.failed(model, model.failure)
        model.loading = asyncio.create_task(self._load(model), name="quire-load")

    async def _load(self, model: ServedModel) -> None:
        """Load a model when it is its turn, and unload others for it; then serve the requests that wait for it."""
        async with self._turn:
            try:
                if model.service is None and await self._make_room(model):
                    await self._open(model)
            except Exception as error:  # noqa: BLE001 - whatever it is, only requests for this model fail
                self._note_failure(model, error)
            finally:
                model.loading, model.makes_room, model.is_wanted = None, False, False
                self._answer_waiters(model)

    def _answer_waiters(self, model: ServedModel) -> None:
        """Give the requests that wait for a model its service, which they hold from now on, or the failure."""
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if waiter.done():  # the client has left
                continue
            if model.service is not None:
                self._begin(model)
                waiter.set_result(model.service)
            elif model.failure is not None:
                waiter.set_exception(self.failed(model, model.failure))
            else:  # the server is closing, or this task was cancelled
                waiter.cancel()

    async def _open(self, model: ServedModel) -> None:
        assert model.open is not None  # else it stays loaded
        model.state, began = ModelState.LOADING, self._clock()
        logger.info("loading %s", model.name)
        service = await asyncio.to_thread(model.open)
        try:
            await service.warm_up()
            model.known = service.facts()
        except BaseException:
            await asyncio.to_thread(service.close)
            raise
        seconds = self._clock() - began
        logger.info("loaded %s in %.1f s; its engine listens at %s", model.name, seconds, service.llm.engine_address)
        model.service, model.state, model.failure = service, ModelState.LOADED, None
        model.last_used = self._clock()
        for note in self._on_open:
            note(model, service)
        self._watch(model, service)
        self._expire_idle(model)

    def _note_failure(self, model: ServedModel, error: Exception) -> None:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        count = 1 if model.failure is None else model.failure.count + 1
        pause = min(_FIRST_PAUSE * 2 ** min(count - 1, 10), _LONGEST_PAUSE)
        logger.error("the model %s could not be loaded: %s", model.name, reason)
        model.failure = LoadFailure(reason, self._clock() + pause, count)
        model.state = ModelState.UNLOADED

    async def _make_room(self, model: ServedModel) -> bool:
        """Unload others until there is room for a model; return False if nobody waits for it any more."""
        most = self.policy.max_loaded
        try:
            while others := self.loaded:
                fits = await asyncio.to_thread(self.policy.fits, model)  # first: none makes room for a broken one
                if fits and (most is None or len(others) < most):
                    break
                if not await self._unload_one(model):
                    return False
            return model.is_awaited and not self._is_closing
        finally:
            for each in self._models:
                each.makes_room = False

    async def _unload_one(self, model: ServedModel) -> bool:
        """Unload the least recently used model once one is idle; return False if nobody waits for `model` any more."""
        while model.is_awaited and not self._is_closing:
            others = self.loaded
            if not others:  # the engine of the last one has died
                return True
            idle = next((other for other in others if other.is_idle), None)
            if idle is not None:
                await self._unload(idle, ModelState.UNLOADED)
                return True
            if not any(other.makes_room for other in others):  # a second one would keep its clients waiting for nothing
                others[0].makes_room = True
            self._changed.clear()
            await self._changed.wait()
        return False

    async def _unload(self, model: ServedModel, state: ModelState) -> None:
        logger.info("unloading %s", model.name)
        await asyncio.to_thread(self._leave(model).close)
        await asyncio.to_thread(_give_back, with_frozen=not self.loaded)
        model.state = state

    def _leave(self, model: ServedModel) -> ModelService:
        """Take the service from a model, which gets no more requests, and return it."""
        service, model.service = model.service, None
        assert service is not None
        self._cancel_expiry(model)
        if model.watching is not None:
            model.watching.cancel()
            model.watching = None
        return service

    def _cancel_expiry(self, model: ServedModel) -> None:
        if model.expiry is not None:
            model.expiry.cancel()
            model.expiry = None

    def _expire_idle(self, model: ServedModel, keep_seconds: float | None = None) -> None:
        """Unload a model after so many seconds of idleness, None for those of the policy; at once if it is unwanted."""
        if model.is_unwanted:
            self._expire_after(model, 0.0, ModelState.UNLOADED)
        else:
            self._expire_after(model, self.policy.keep_seconds if keep_seconds is None else keep_seconds)

    def _expire_after(self, model: ServedModel, seconds: float, state: ModelState = ModelState.SLEEPING) -> None:
        """Unload a model after so many seconds of idleness."""
        if model.open is None:
            return
        model.keep_seconds = seconds
        self._cancel_expiry(model)
        if model.is_idle and seconds < _FOR_EVER:
            model.expiry = asyncio.get_running_loop().call_later(seconds, self._expire, model, state)

    def _expire(self, model: ServedModel, state: ModelState) -> None:
        model.expiry = None
        self._spawn(self._unload_idle(model, state))

    async def _unload_idle(self, model: ServedModel, state: ModelState) -> None:
        """Unload a model when it is its turn, if it is idle and was not used meanwhile."""
        used = model.last_used
        async with self._turn:
            if model.is_idle and model.last_used == used:
                await self._unload(model, state)

    def _watch(self, model: ServedModel, service: ModelService) -> None:
        model.watching = asyncio.create_task(self._note_death(model, service), name="quire-watch")

    async def _note_death(self, model: ServedModel, service: ModelService) -> None:
        """Note the death of an engine that is not started again: that of the only model ends the server."""
        error = await service.llm.wait_dead()
        if len(self._models) == 1:
            self.dead_error = error
            self._died.set()
            return
        model.watching = None  # this task
        self._leave(model)
        self._note_failure(model, error)
        self._changed.set()
        self._spawn(self._close_dead(service))

    async def _close_dead(self, service: ModelService) -> None:
        with suppress(EngineDeadError):
            await asyncio.to_thread(service.close)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _give_back(*, with_frozen: bool) -> None:
    """Give the memory of a service that is no longer used back to the system: cycles would keep its tokenizer.

    `with_frozen`: also that of objects that were there when the server began, which takes longer.
    """
    thaws = with_frozen and gc.get_freeze_count() > 0
    if thaws:
        gc.unfreeze()
    gc.collect()
    if thaws:
        gc.freeze()
    trim_heap()
