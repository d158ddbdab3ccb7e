"""Runs against one target, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext

from quire.frontend.evaluation.replay.extent import Extent
from quire.frontend.evaluation.replay.load import Load
from quire.frontend.evaluation.replay.runner import Collector, Replay
from quire.frontend.evaluation.replay.target import Target
from quire.frontend.evaluation.workload.prompts import Prompts
from quire.frontend.evaluation.workload.request import WorkloadRequest

_FEW_TOKENS = 1000  # that every model has, for servers that do not tell how many

Shown = Callable[[Replay], AbstractAsyncContextManager[None]]
"""Shows a run while it goes on."""


class Runs:
    """Makes runs, until one is stopped. `vocab_size`: made-up prompts have ids below it; None: the target's."""

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
        collector: Collector,
        requests: Iterable[WorkloadRequest],
        load: Load,
        *,
        seed: int = 0,
        extent: Extent | None = None,
    ) -> str | None:
        """Make a run; returns and raises what `Replay.run` does. `seed` decides the tokens of its prompts.

        `extent`: how long the workload is, as far as is known before it is read.
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
        """End the run under way, or else the next one, with what has been measured."""
        self._stopped = reason
        if self._running is not None:
            self._running.stop(reason)
