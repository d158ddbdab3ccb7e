"""Utility calls, by which clients ask for anything but tokens; a table has them by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from quire.engine_core.stats import EngineState, take_prefix_tree, take_snapshot
from quire.engine_core.validation import check_prefix
from quire.protocol.messages import UtilityCall

MAX_SUBSCRIBERS = 16
"""Clients that may trace the steps at once."""

DEFERRED: Final = object()
"""The result of a call that is answered later."""


def refuse_reload(_client_id: bytes, _call: UtilityCall) -> object:
    """Raise ValueError: without a supervisor nobody starts another engine."""
    raise ValueError(
        "this engine has no supervisor that could start another one in its place; start it with `quire engine`, "
        "`quire serve` or LLM"
    )


def perform(core: EngineState, client_id: bytes, call: UtilityCall) -> object:
    """Return the result of a utility call. Raises ValueError if it is unknown or fails."""
    utility = UTILITIES.get(call.method)
    if utility is None:
        raise ValueError(f"there is no utility call {call.method!r}; there are {', '.join(UTILITIES)}")
    return utility(core, client_id, call)


def _stats(core: EngineState, _client_id: bytes, _call: UtilityCall) -> object:
    more = {"deferred": core.scheduler.waiting.num_held, "totals": msgspec.to_builtins(core.totals)}
    stats = msgspec.structs.asdict(core.stats) | more | core.server_stats() | core.scheduler.served.stats()
    for tier in core.tiers:
        stats |= tier.stats()
    return stats


def _reset_cache(core: EngineState, _client_id: bytes, _call: UtilityCall) -> int:
    """Return the number of pages dropped. Pages that requests use stay."""
    core.scheduler.pins.unpin_all()
    return core.sequences.tree.evict(core.sequences.cached_pages)


def _pin_prefix(core: EngineState, _client_id: bytes, call: UtilityCall) -> int:
    check_prefix(call.token_ids, call.cache_salt, core.limits)
    return core.scheduler.pins.pin(call.token_ids, call.cache_salt)


def _trace_start(core: EngineState, client_id: bytes, _call: UtilityCall) -> None:
    subscribers = core.tracer.subscribers
    if client_id not in subscribers and len(subscribers) >= MAX_SUBSCRIBERS:
        raise ValueError(f"{MAX_SUBSCRIBERS} clients are tracing this engine, and no more may; end one of them first")
    core.tracer.start(client_id, core.scheduler.waiting, core.clock())


UTILITIES: dict[str, Callable[[EngineState, bytes, UtilityCall], object]] = {
    "stats": _stats,
    "reset_cache": _reset_cache,
    "pin_prefix": _pin_prefix,
    "unpin_prefix": lambda core, _, call: core.scheduler.pins.unpin(call.cache_salt, call.token_ids),
    "trace_start": _trace_start,
    "trace_stop": lambda core, client_id, _: core.tracer.stop(client_id, core.clock()),
    "snapshot": lambda core, *_: take_snapshot(core),
    "prefix_tree": lambda core, _, call: take_prefix_tree(core, call.shown),
    "reload": lambda core, client_id, call: core.reload(client_id, call),
    "shutdown": lambda core, *_: core.drain(),
}
