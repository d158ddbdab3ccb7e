"""The process around an engine, as far as the engine calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.protocol.messages import UtilityCall


def refuse_reload(_client_id: bytes, _call: UtilityCall) -> object:
    """Raise ValueError: without a supervisor nobody starts another engine."""
    raise ValueError(
        "this engine has no supervisor that could start another one in its place; start it with `quire engine`, "
        "`quire serve` or LLM"
    )


@dataclass(frozen=True)
class EngineHost:
    """Callbacks of the process that runs an engine.

    `wake` is called, on any thread, when `step` is to be called. `reload` carries out the utility call of that name.
    `server_stats` returns counters of the socket and the memory. Under a supervisor, requests outlive the process.
    """

    wake: Callable[[], None] = lambda: None
    reload: Callable[[bytes, UtilityCall], object] = refuse_reload
    server_stats: Callable[[], dict[str, int]] = dict
    is_supervised: bool = False
