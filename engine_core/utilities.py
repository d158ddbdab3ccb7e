"""Utility calls, by which clients ask for anything but tokens; a table has them by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from quire.engine_core.limits import EngineLimits
from quire.engine_core.snapshot import EngineState, take_snapshot
from quire.engine_core.stats import num_deferred
from quire.engine_core.trace import Tracer
from quire.engine_core.validation import check_prefix
from quire.protocol.messages import EngineSnapshot, UtilityCall


class EngineControl(EngineState, Protocol):
    """The parts of `EngineCore` that utility calls use."""

    limits: EngineLimits
    tracer: Tracer
    server_stats: Callable[[], dict[str, int]]

    def drain(self) -> None:
        """Reject new requests from now on."""


def perform(core: EngineControl, client_id: bytes, call: UtilityCall) -> object:
    """Return the result of a utility call. Raises ValueError if it is unknown or fails."""
    utility = UTILITIES.get(call.method)
    if utility is None:
        raise ValueError(f"there is no utility call {call.method!r}; there are {', '.join(UTILITIES)}")
    return utility(core, client_id, call)


def _stats(core: EngineControl, _client_id: bytes, _call: UtilityCall) -> object:
    more = {"deferred": num_deferred(core.scheduler.waiting), "totals": msgspec.to_builtins(core.totals)}
    return msgspec.structs.asdict(core.stats) | more | core.server_stats()


def _reset_cache(core: EngineControl, _client_id: bytes, _call: UtilityCall) -> int:
    """Return the number of pages dropped. Pages that requests use stay."""
    core.scheduler.pins.unpin_all()
    return core.sequences.tree.evict(core.sequences.cached_pages)


def _pin_prefix(core: EngineControl, _client_id: bytes, call: UtilityCall) -> int:
    check_prefix(call.token_ids, call.cache_salt, core.limits)
    return core.scheduler.pins.pin(call.token_ids, call.cache_salt)


def _unpin_prefix(core: EngineControl, _client_id: bytes, call: UtilityCall) -> bool:
    return core.scheduler.pins.unpin(call.cache_salt, call.token_ids)


def _trace_start(core: EngineControl, client_id: bytes, _call: UtilityCall) -> None:
    core.tracer.start(client_id, core.scheduler.waiting, core.clock())


def _trace_stop(core: EngineControl, client_id: bytes, _call: UtilityCall) -> None:
    core.tracer.stop(client_id, core.clock())


def _snapshot(core: EngineControl, _client_id: bytes, _call: UtilityCall) -> EngineSnapshot:
    return take_snapshot(core)


def _shutdown(core: EngineControl, _client_id: bytes, _call: UtilityCall) -> None:
    core.drain()


UTILITIES: dict[str, Callable[[EngineControl, bytes, UtilityCall], object]] = {
    "stats": _stats,
    "reset_cache": _reset_cache,
    "pin_prefix": _pin_prefix,
    "unpin_prefix": _unpin_prefix,
    "trace_start": _trace_start,
    "trace_stop": _trace_stop,
    "snapshot": _snapshot,
    "shutdown": _shutdown,
}
