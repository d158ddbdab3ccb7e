"""Consecutive runs against one target."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext

from quire.frontend.evaluation.replay.load import Extent, Load
from quire.frontend.evaluation.replay.runner import Replay, RunCollector
from quire.frontend.evaluation.replay.target import Target
from quire.frontend.evaluation.workload.blocks import Prompts
from quire.frontend.evaluation.workload.request import WorkloadRequest

_FEW_TOKENS = 1000  # that every model has, for servers that do not report their vocabulary

Shown = Callable[[Replay], AbstractAsyncContextManager[None]]
"""Display of a run's progress."""


class Runs:
    """Runs until one is stopped. `vocab_size`: upper limit of synthetic token ids; None: the target's."""

    def __init__(
        self, target: Target, *, vocab_size: int | None = None, shown: Shown = lambda replay: nullcontext()
    ) -> None:
        self.target = target
        self.vocab_size = vocab_size or target.info.vocab_size or _FEW_TOKENS
        self._shown = shown
        self._running: Replay | None = None
        self._stopped: str | None = None

    async def replay(
        self,
        collector: RunCollector,
        requests: Iterable[WorkloadRequest],
        load: Load,
        *,
        seed: int = 0,
        extent: Extent | None = None,
    ) -> str | None:
        """Make a run; return and raise what `Replay.run` does. `seed` determines the tokens of its prompts.

        `extent`: length of the workload, as far as it is known in advance.
        """
        prompts = Prompts(self.vocab_size, seed, avoid=self.target.info.special_token_ids)
        self._running = replay = Replay(self.target, collector, prompts.tokens, load, extent)
        if self._stopped is not None:
            replay.stop(self._stopped)
        try:
            async with self._shown(replay):
                return await replay.run(requests)
        finally:
            self._running = None

    def stop(self, reason: str) -> None:
        """End the current run, or else the next one, with what has been measured."""
        self._stopped = reason
        if self._running is not None:
            self._running.stop(reason)
