"""One model of a server: its names, its engine while there is one, and the requests that hold it or wait for it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from quire.frontend.http.models.adapters import ServedAdapters
from quire.frontend.http.service import ModelFacts, ModelService, public_names, with_tag
from quire.frontend.metrics.server import ServerMetrics


class ModelState(StrEnum):
    """The states of a model, in the words of llama.cpp's server. One that sleeps was unloaded because it was idle."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    SLEEPING = "sleeping"


@dataclass(frozen=True)
class LoadFailure:
    """The reason for which a model could not be loaded, the time of the next try, and the failures in a row."""

    reason: str
    retry_at: float
    count: int


@dataclass(eq=False)
class ServedModel:
    """One model of a server. Only `ModelLoader` changes it.

    `path`: its folder, its GGUF file or its name, as it was given. `open`: loads it and returns its service, on any
    thread, or raises an exception; None for a model that stays loaded. `state`: it counts as loaded until its engine
    has ended. `known`: its facts when they were last needed, see `facts`. `num_open`: the requests that hold it.
    `waiters`: those that wait for it. `is_wanted`: it is to be loaded although none waits. `is_unwanted`: it is to be
    unloaded once it is idle. `makes_room`: the same, for another model, so that new requests wait. `last_used`: by the
    loader's clock.
    `keep_seconds`: seconds of idleness after which it is unloaded.
    """

    names: Sequence[str]
    path: str
    metrics: ServerMetrics
    open: Callable[[], ModelService] | None = None
    service: ModelService | None = None
    state: ModelState = ModelState.UNLOADED
    known: ModelFacts | None = None
    failure: LoadFailure | None = None
    num_open: int = 0
    waiters: list[asyncio.Future[ModelService]] = field(default_factory=list)
    is_wanted: bool = False
    is_unwanted: bool = False
    makes_room: bool = False
    last_used: float = 0.0
    keep_seconds: float = math.inf
    expiry: asyncio.TimerHandle | None = None
    loading: asyncio.Task[None] | None = None
    watching: asyncio.Task[None] | None = None
    _adapters: ServedAdapters = field(default_factory=ServedAdapters, init=False)

    @classmethod
    def of(cls, service: ModelService, reopen: Callable[[], ModelService] | None = None) -> ServedModel:
        """Return a model that is loaded; `reopen` loads it again, and without it the model stays loaded."""
        model = cls(service.names, service.llm.model, service.metrics, reopen, service, ModelState.LOADED)
        model._adapters.follow(service.llm.engine_info.adapters)  # now: it may sleep when they are first needed
        return model

    @property
    def name(self) -> str:
        """The name that responses use."""
        return self.names[0]

    @property
    def public_names(self) -> list[str]:
        """The names that clients are told."""
        return public_names(self.names)

    @property
    def facts(self) -> ModelFacts | None:
        """Its facts, None if it was never loaded. A reload changes them."""
        if self.service is not None and (self.known is None or self.known.info is not self.service.llm.engine_info):
            self.known = self.service.facts()
        return self.known

    @property
    def adapters(self) -> ServedAdapters:
        """Its adapters, which are served as models too, whether or not it is loaded."""
        if self.service is not None:
            self._adapters.follow(self.service.llm.engine_info.adapters)
        return self._adapters

    @property
    def is_loaded(self) -> bool:
        """True if requests can be served."""
        return self.service is not None

    @property
    def is_idle(self) -> bool:
        """True if it is loaded, and no request holds it."""
        return self.service is not None and not self.num_open

    @property
    def is_awaited(self) -> bool:
        """True if it is to be loaded."""
        return self.is_wanted or any(not waiter.done() for waiter in self.waiters)

    def is_named(self, name: str) -> bool:
        """Return True for a name of the model, with or without its tag."""
        return with_tag(name) in map(with_tag, self.names)
