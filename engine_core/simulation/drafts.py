"""Simulated speculative decoding: drafts that hold with one probability."""

from __future__ import annotations

import random
from collections.abc import Callable

from quire.engine_core.speculation.speculation import Speculation
from quire.engine_core.speculation.synthetic import SyntheticDrafts
from quire.kernels.runner import Sequences
from quire.protocol.engine_shape import EngineShape
from quire.protocol.speculative_config import SpeculativeConfig


class SimulatedDrafts(SyntheticDrafts):
    """Drafts without tokens; `accept` says how many of them hold."""

    def __init__(self, sequences: Sequences, acceptance: float) -> None:
        super().__init__(sequences, acceptance)
        self._random = random.Random(0)

    def _append(self, slot: int) -> None:
        """Append nothing: the executor does not look at drafts."""

    def accept(self, num_drafts: int) -> int:
        """Return how many of these drafts hold, those before the first that does not."""
        return next((i for i in range(num_drafts) if self._random.random() >= self._acceptance), num_drafts)


def simulated_speculation(
    config: SpeculativeConfig | None, sequences: Sequences, limits: EngineShape, clock: Callable[[], float]
) -> tuple[Speculation | None, SimulatedDrafts | None]:
    """Return the speculation of a simulated engine, and its drafts. Raises ValueError without an acceptance length."""
    if config is None:
        return None, None
    if config.synthetic_acceptance is None:
        raise ValueError(
            "speculative_config lacks synthetic_acceptance_length, which a simulation cannot know; give it"
        )
    drafts = SimulatedDrafts(sequences, config.synthetic_acceptance)
    return Speculation(drafts, sequences, config.max_drafts, limits, clock, is_adaptive=config.adaptive), drafts
