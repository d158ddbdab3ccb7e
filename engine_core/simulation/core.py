"""An engine core that goes through steps in which nothing begins or ends without a look at each that decodes."""

from __future__ import annotations

import copy
from itertools import repeat

from quire.engine_core.engine import EngineCore, Send
from quire.engine_core.limits import EngineLimits
from quire.engine_core.request import Request
from quire.engine_core.scheduling.roster import Roster
from quire.engine_core.simulation.clock import VirtualClock
from quire.engine_core.simulation.executor import SimulatedExecutor
from quire.engine_core.simulation.run import Chunks, Run
from quire.engine_core.stats import LastStep

_MOST_STEPS = 64  # with prompts that are foreseen: who comes meanwhile makes some of it useless
_MOST_DECODES = 1024  # steps without, which cost little to foresee


class SimulatedCore(EngineCore):
    """Between two events all who decode get one more token a step, and the scheduler decides only about prompts.

    Nobody comes, starts, gets a first token or a last one, and there are pages for all. `foresee` tells how long that
    will go on, by the scheduler's own words, and `pass_through` leaves everything as so many calls of `step` would, but
    for the numbers of pages, and `totals`.
    """

    def __init__(self, executor: SimulatedExecutor, limits: EngineLimits, send: Send, clock: VirtualClock) -> None:
        super().__init__(executor, limits, send, clock=clock)
        self._simulated = executor

    def foresee(self) -> Run:
        """The steps from now on up to the next event, if nobody comes; perhaps none."""
        scheduler, run = self.scheduler, Run(self.clock())
        if scheduler.waiting and len(scheduler.running) < self.limits.max_num_seqs:  # somebody may start
            return run
        roster = Roster.of(scheduler.running)
        run.decodes = roster.decodes
        if (most := self._most_steps(roster)) < 1:
            return run
        if not roster.prefills:
            run.ends = self._simulated.decode_ends(run.begin, len(run.decodes), _kv_tokens(run.decodes), most)
            return run
        computed = [request.num_computed_tokens for request in roster.prefills]
        pace, scheduler.pace = scheduler.pace, copy.copy(scheduler.pace)
        self._look_ahead(run, roster, most)
        scheduler.pace = pace
        for request, count in zip(roster.prefills, computed, strict=True):
            request.num_computed_tokens = count
        return run

    def _look_ahead(self, run: Run, roster: Roster, most: int) -> None:
        """Appends to `run` until a prompt is done, and leaves the prompts and the pace as they are then."""
        pace, size, now = self.scheduler.pace, len(roster.decodes), run.begin
        tokens, kv_tokens = self.limits.max_num_batched_tokens - size, _kv_tokens(roster.decodes)
        for _ in range(most):
            shares = pace.share(roster.prefills, tokens, self.scheduler.prefill_budget(roster))
            if any(count == request.num_new_tokens for request, count in shares):
                return
            chunks = Chunks(shares, pace.prefill_cost(shares))
            end = now + self._simulated.seconds(shares, size, kv_tokens)
            pace.learn(chunks.cost, size, end - now)
            for request, count in shares:
                request.num_computed_tokens += count
            run.ends.append(end)
            run.chunks.append(chunks)
            now, kv_tokens = end, kv_tokens + size

    def _most_steps(self, roster: Roster) -> int:
        """Steps before one of those who decode ends, or, at least, for which there are pages."""
        left = [self._simulated.tokens_left(request.slot, request.token_limit) for request in roster.decodes]
        most = _MOST_STEPS if roster.prefills else _MOST_DECODES
        steps = min([most, *(tokens - 1 for tokens in left)]) if self.scheduler.running else 0
        available = self.scheduler.available_pages
        while steps > 0 and sum(self._pages_lacked(request, steps) for request in roster.decodes) > available:
            steps //= 2
        return steps

    def _pages_lacked(self, request: Request, steps: int) -> int:
        """For what so many steps compute."""
        missing = request.num_tokens + steps - 1 - request.num_reserved_tokens
        return self.limits.pages_for(missing) if missing > 0 else 0

    def pass_through(self, run: Run) -> None:
        """The steps of a run that begins now."""
        admission, pace, size, count = self.scheduler.admission, self.scheduler.pace, len(run.decodes), len(run.ends)
        before, seconds = run.begin, 0.0
        for end, cost in zip(run.ends, [each.cost for each in run.chunks] or repeat(0.0), strict=False):
            seconds, before = end - before, end
            admission.stepped()
            admission.decoded(size)
            pace.learn(cost, size, seconds)
        prefill_tokens = run.chunks[-1].tokens if run.chunks else 0
        self._last = LastStep(self._last.number + count, prefill_tokens, size, execute_seconds=seconds)
        for request in run.decodes:
            self._extend(request, count)
        self._prefill(run)

    def _extend(self, request: Request, count: int) -> None:
        """Its next tokens, and the pages for all but the last, which is not computed yet."""
        request.num_tokens += count - 1
        if request.num_tokens > request.num_reserved_tokens:
            self.scheduler.reserve(request)
        request.num_tokens += 1
        request.num_computed_tokens += count
        self._simulated.extend(request.slot, count)

    def _prefill(self, run: Run) -> None:
        """The parts of prompts."""
        touched: dict[Request, None] = {}
        for chunks in run.chunks:
            for request, count in chunks.shares:
                request.num_computed_tokens += count
                touched[request] = None
        for request in touched:
            self.sequences.share(request.slot, request.num_computed_tokens)


def _kv_tokens(decodes: list[Request]) -> int:
    return sum(request.num_computed_tokens for request in decodes)
