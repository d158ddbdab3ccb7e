"""Pauses of the control plane between steps, when many clients search trees in a pool that is always full."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

from bench.cache_shapes import VOCAB_SIZE, TreeSearch
from bench.instant_engine import InstantEngine, Pause

from quire.engine_core.process import tune_interpreter
from quire.kernels.runner import Sequences
from quire.protocol.messages import SchedulerStats


@dataclass
class Pauses:
    """Pauses of a run, and its statistics."""

    steps: list[Pause]
    num_requests: int
    stats: SchedulerStats  # statistics at the end of the run
    num_collections: int  # runs of Python's garbage collector during the measurement
    num_garbage: int = field(default=0)  # objects that only a collection would have freed


def search_trees(
    *, clients: int, steps: int, block_size: int, num_pages: int, answer_tokens: int, policy: str, seed: int
) -> Pauses:
    """Let each client search its own trees, one thought at a time, and measure once the pool is full."""
    engine = InstantEngine(
        Sequences(num_pages, block_size, VOCAB_SIZE), block_size, num_pages, policy=policy, max_num_seqs=clients
    )
    engine.add_clients([TreeSearch(block_size, seed + 1 + client) for client in range(clients)], answer_tokens)
    while engine.core.stats.evictions == 0:
        engine.step()
    collections = 0

    def count(phase: str, _info: dict[str, int]) -> None:
        nonlocal collections
        collections += phase == "start"

    tune_interpreter()  # as the engine's process does
    gc.callbacks.append(count)
    ended = engine.num_ended
    pauses = [engine.step() for _ in range(steps)]
    gc.callbacks.remove(count)
    garbage = gc.collect()
    gc.unfreeze()
    gc.enable()
    return Pauses(pauses, engine.num_ended - ended, engine.core.stats, collections, garbage)
