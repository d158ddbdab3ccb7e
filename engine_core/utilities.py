"""Utility calls, by which clients ask for anything but tokens; a table has them by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from quire.engine_core.stats import EngineState, take_prefix_tree, take_snapshot
from quire.engine_core.validation import check_prefix
from quire.protocol.messages import UtilityCall

DEFERRED: Final = object()
"""The result of a call that is answered later."""


def perform(core: EngineState, client_id: bytes, call: UtilityCall) -> object:
    """Return the result of a utility call. Raises ValueError if it is unknown or fails."""
    if (utility := UTILITIES.get(call.method)) is not None:
        return utility(core, client_id, call)
    for feature in core.features:
        if (own := feature.utilities.get(call.method)) is not None:
            return own(client_id, call)
    raise ValueError(f"there is no utility call {call.method!r}; there are {', '.join(utility_names(core))}")


def utility_names(core: EngineState) -> list[str]:
    """Return the names of all utility calls."""
    return [*UTILITIES, *(name for feature in core.features for name in feature.utilities)]


def _stats(core: EngineState, _client_id: bytes, _call: UtilityCall) -> object:
    more = {"deferred": core.scheduler.waiting.num_held, "totals": msgspec.to_builtins(core.totals)}
    stats = msgspec.structs.asdict(core.stats) | more | core.host.server_stats()
    for counters in [part.stats() for part in core.features] + [tier.stats() for tier in core.tiers]:
        stats |= counters
    return stats


def _reset_cache(core: EngineState, _client_id: bytes, _call: UtilityCall) -> int:
    """Return the number of pages dropped. Pages that requests use stay."""
    core.scheduler.pins.unpin_all()
    return core.sequences.tree.evict(core.sequences.cached_pages)


def _pin_prefix(core: EngineState, _client_id: bytes, call: UtilityCall) -> int:
    check_prefix(call.token_ids, call.cache_salt, core.limits)
    return core.scheduler.pins.pin(call.token_ids, call.cache_salt)


UTILITIES: dict[str, Callable[[EngineState, bytes, UtilityCall], object]] = {
    "stats": _stats,
    "reset_cache": _reset_cache,
    "pin_prefix": _pin_prefix,
    "unpin_prefix": lambda core, _, call: core.scheduler.pins.unpin(call.cache_salt, call.token_ids),
    "snapshot": lambda core, *_: take_snapshot(core),
    "prefix_tree": lambda core, _, call: take_prefix_tree(core, call.shown),
    "reload": lambda core, client_id, call: core.host.reload(client_id, call),
    "shutdown": lambda core, *_: core.drain(),
}
