"""The interface by which features follow the requests and the steps of an engine, which knows none of them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from quire.engine_core.request import Request, RequestStatus
from quire.engine_core.scheduling.batch import Batch
from quire.engine_core.scheduling.prefill_budget import PrefillBudget
from quire.engine_core.validation import RejectedError
from quire.protocol.messages import (
    ClientMessage,
    EngineCoreRequest,
    FinishReason,
    KvMessage,
    SchedulerStats,
    UtilityCall,
)
from quire.protocol.totals import EngineTotals

Utility = Callable[[bytes, UtilityCall], object]
"""Carries out a utility call of a client, and returns its result. Raises ValueError if it fails."""


class Feature:
    """A part of the engine that keeps its own state. Each hook does nothing unless overridden.

    The loop's thread calls all hooks but `receive_kv` and `report_sent`. What they raise, but for the errors that they
    name, ends the engine.
    """

    takes_adapters = False  # requests may name adapters, which this feature gives them

    @property
    def utilities(self) -> Mapping[str, Utility]:
        """The utility calls of this feature by name."""
        return {}

    def attach(self, requests: Iterable[Request]) -> None:
        """Learn how to list the open requests, once and before all else."""

    def evict(self) -> None:
        """Give back memory that can be had again: there is little left. Between steps."""

    # Requests

    def check(self, message: EngineCoreRequest) -> None:
        """Raise RejectedError for a request that must not be accepted."""

    def begin(self, request: Request) -> None:
        """Take a request that is about to be queued. It may have to wait: see `held_status`."""

    def held_status(self, request: Request) -> RequestStatus | None:
        """Return the status of a request that must not start before `take_ready` yields it; None if it may."""
        return None

    def take_ready(self) -> Iterable[tuple[Request, RejectedError | None]]:
        """Yield requests that are not held any longer, or must end with an error; before each step."""
        return ()

    def add(self, request: Request) -> None:
        """Follow a request that has been queued."""

    def remove(self, request: Request, reason: FinishReason | None, now: float) -> None:
        """Forget a request that ends; its sequences are still open."""

    # Steps, in the order of their hooks

    def choose_alone(self, running: Iterable[Request]) -> Request | None:
        """Return the running request that is to have the next step for itself, if there is one."""
        return None

    def may_share(self, running: Iterable[Request]) -> Iterable[Request]:
        """Return the running requests that may share a step."""
        return running

    def extend(self, batch: Batch, budget: PrefillBudget, free_pages: int) -> None:
        """Add to a batch that has been decided; so many pages can be had."""

    def scheduled(self, batch: Batch) -> None:
        """Note a batch before its requests move on; it may be empty."""

    def begin_step(self, batch: Batch) -> None:
        """Note a batch, or the part of one that has failed, which is about to be computed."""

    def end_step(self, batch: Batch, seconds: float | None) -> None:
        """Note a batch that has been computed in so many seconds; None if that took several attempts."""

    def update(self) -> None:
        """Do what is due after each step, also one that has computed nothing."""

    def report(self, begun: float, batch: Batch, stats: SchedulerStats | None) -> None:
        """Tell what a step has done that has begun at `begun`; without `stats` it has computed nothing."""

    # Pages, messages and statistics

    def free_idle_pages(self) -> bool:
        """Give back the pages that are held for no request; return True if there were any."""
        return False

    def receive(self, client_id: bytes, message: ClientMessage) -> bool:
        """Take a message of a client; return False if it is of no kind that this feature takes."""
        return False

    def receive_kv(self, client_id: bytes, message: KvMessage) -> None:
        """Take a message of another engine that need not wait for the step to end. Any thread."""

    def report_sent(self, client_id: bytes) -> None:
        """Note that a PrefixReport to a client has left, so that it can take another. Any thread."""

    def forget(self, client_id: bytes) -> None:
        """Forget a client that has left."""

    def count(self, totals: EngineTotals) -> None:
        """Set its own fields of the totals since the engine's start."""

    def stats(self) -> dict[str, float]:
        """Return counters by name, for `stats`."""
        return {}

    def stop(self) -> bool:
        """End its threads when the engine steps no more; return False if one can't be ended."""
        return True


HeldStatus = Callable[[Request], RequestStatus | None]


def held_status(of_each: Iterable[HeldStatus], request: Request) -> RequestStatus | None:
    """Return the status of a request that a feature holds; None if all let it start."""
    return next((status for of in of_each if (status := of(request)) is not None), None)


P = ParamSpec("P")
R = TypeVar("R")


def hooks(features: Sequence[Feature], hook: Callable[Concatenate[Feature, P], R]) -> list[Callable[P, R]]:
    """Return a hook of Feature, bound to each of the features that override it."""
    name = hook.__name__
    return [getattr(feature, name) for feature in features if getattr(type(feature), name) is not hook]
