"""Foresight: steps in which nothing begins or ends are computed at once, without visiting each decoding request."""

from __future__ import annotations

import copy
from array import array
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from quire.engine_core.engine import EngineCore, EngineParts
from quire.engine_core.features import make_features
from quire.engine_core.outputs import Send
from quire.engine_core.request import Request
from quire.engine_core.scheduling.batch import RunningRequests
from quire.engine_core.simulation.executor import SimulatedExecutor, VirtualClock
from quire.engine_core.simulation.page_exchange import PageExchange
from quire.engine_core.speculation.speculation import Speculation
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import SchedulerStats

_MAX_PREFILL_STEPS = 64  # that are foreseen with prompts: an arrival makes the rest of them useless
_MAX_DECODE_STEPS = 1024  # without prompts, which cost little to foresee


@dataclass(slots=True)
class ForeseenPrefill:
    """A request in prefill, some foreseen steps from now."""

    request: Request
    number: int
    arrival: float
    num_computed_tokens: int
    num_new_tokens: int

    @classmethod
    def of(cls, request: Request) -> ForeseenPrefill:
        """Return a request as it is now."""
        return cls(request, request.number, request.arrival, request.num_computed_tokens, request.num_new_tokens)

    def compute(self, count: int) -> None:
        """Move on by a chunk."""
        self.num_computed_tokens += count
        self.num_new_tokens -= count


class Chunks(NamedTuple):
    """The prompt chunks of one step, and their cost as PrefillBudget counts it."""

    shares: list[tuple[ForeseenPrefill, int]]
    cost: float

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(count for _, count in self.shares)


@dataclass(slots=True)
class ForeseenSteps:
    """Steps of which the first begins at `begin`, and each other one when the one before it ends.

    In each, the requests of `decodes` get one more token. `chunks` has the prompt chunks of each step, and is empty if
    there are none.
    """

    begin: float
    decodes: list[Request] = field(default_factory=list)
    ends: array[float] = field(default_factory=lambda: array("d"))
    chunks: list[Chunks] = field(default_factory=list)

    @property
    def end(self) -> float:
        """The time at which the step after them begins."""
        return self.ends[-1] if self.ends else self.begin

    def count_before(self, time: float) -> int:
        """Return how many of the steps begin before this time."""
        if not self.ends or self.begin >= time:
            return 0
        return 1 + bisect_left(self.ends, time, 0, len(self.ends) - 1)

    def cut(self, time: float) -> None:
        """Drop the steps that begin at this time or later."""
        count = self.count_before(time)
        del self.ends[count:]
        del self.chunks[count:]

    def take(self, time: float) -> ForeseenSteps:
        """Remove and return the steps that begin before this time."""
        count = self.count_before(time)
        taken = ForeseenSteps(self.begin, self.decodes, self.ends[:count], self.chunks[:count])
        self.begin = taken.end
        del self.ends[:count]
        del self.chunks[:count]
        return taken


class SimulatedCore(EngineCore):
    """An engine core that can skip steps. Between two events each decoding request gets a token in every step.

    No request arrives, starts, gets a first token or a last one, and there are pages for all. `foresee` asks the
    scheduler how long that will go on, and `pass_through` leaves everything as that many calls of `step` would, but for
    the numbers of pages, and `totals`.
    """

    def __init__(
        self,
        executor: SimulatedExecutor,
        limits: EngineShape,
        send: Send,
        clock: VirtualClock,
        speculation: Speculation | None = None,
        exchange: PageExchange | None = None,
    ) -> None:
        """`exchange`: what fetches pages from other engines, and serves them."""
        peers, server = (None, None) if exchange is None else (exchange.peers, exchange.server)
        features = make_features(
            executor.sequences, limits, send, clock, page_server=server, chosen=[speculation, peers]
        )
        super().__init__(executor, limits, send, EngineParts(features, peers=peers), clock=clock)
        self._simulated = executor
        self._server = server
        self._may_draft = speculation is not None  # then a step may give more than one token

    def foresee(self) -> ForeseenSteps:
        """Return the steps up to the next event if no request arrives; there may be none."""
        scheduler, steps = self.scheduler, ForeseenSteps(self.clock())
        if scheduler.waiting and len(scheduler.running) < self.limits.max_num_seqs:  # a request may start
            return steps
        if self._may_draft or self._is_exchanging:
            return steps
        running = RunningRequests.of(scheduler.running, self.sequences)
        steps.decodes = running.decodes
        if (most := self._most_steps(running)) < 1:
            return steps
        if not running.prefills:
            kv_tokens = _kv_tokens(steps.decodes)
            steps.ends = self._simulated.decode_ends(steps.begin, len(steps.decodes), kv_tokens, most)
            return steps
        self._look_ahead(steps, [ForeseenPrefill.of(request) for request in running.prefills], most)
        return steps

    @property
    def _is_exchanging(self) -> bool:
        """True while pages come or go, of which each step takes notice."""
        return self.scheduler.fetches.is_open or (self._server is not None and self._server.is_busy)

    def _look_ahead(self, steps: ForeseenSteps, prefills: list[ForeseenPrefill], most: int) -> None:
        """Append to `steps` until a prompt is done."""
        budget, size, now = copy.copy(self.scheduler.prefill_budget), len(steps.decodes), steps.begin
        tokens, kv_tokens = self.limits.max_num_batched_tokens - size, _kv_tokens(steps.decodes)
        for _ in range(most):
            max_cost = budget.max_cost(size, self.scheduler.prefill_backlog(prefills))
            shares = budget.share(prefills, tokens, max_cost, now)
            if any(count == prompt.num_new_tokens for prompt, count in shares):
                return
            chunks = Chunks(shares, budget.cost(shares))
            end = now + self._simulated.seconds(shares, size, kv_tokens)
            budget.learn(chunks.cost, size, end - now)
            for prompt, count in shares:
                prompt.compute(count)
            steps.ends.append(end)
            steps.chunks.append(chunks)
            now, kv_tokens = end, kv_tokens + size

    def _most_steps(self, running: RunningRequests) -> int:
        """Return at most as many steps as come before a decoding request ends, and as there are pages for."""
        left = [self._simulated.tokens_left(request.slot, request.stop.token_limit) for request in running.decodes]
        most = _MAX_PREFILL_STEPS if running.prefills else _MAX_DECODE_STEPS
        steps = min([most, *(tokens - 1 for tokens in left)]) if self.scheduler.running else 0
        available = self.scheduler.available_pages
        while steps > 0 and self.scheduler.pages_lacked(running.decodes, steps) > available:
            steps //= 2
        return steps

    def pass_through(self, steps: ForeseenSteps) -> None:
        """Take steps that begin now."""
        admission, budget = self.scheduler.admission, self.scheduler.prefill_budget
        size, count = len(steps.decodes), len(steps.ends)
        before, seconds = steps.begin, 0.0
        for end, cost in zip(steps.ends, [each.cost for each in steps.chunks] or repeat(0.0), strict=False):
            seconds, before = end - before, end
            admission.stepped()
            admission.decoded(size)
            budget.learn(cost, size, seconds)
        prefill_tokens = steps.chunks[-1].num_tokens if steps.chunks else 0
        step = self.last_step.step + count
        self.record_step(
            SchedulerStats(step, prefill_tokens=prefill_tokens, decode_tokens=size, execute_seconds=seconds)
        )
        for request in steps.decodes:
            self._extend(request, count)
        self._prefill(steps)

    def _extend(self, request: Request, count: int) -> None:
        """Add tokens to a request, and the pages for all but the last, which is not computed yet."""
        self.sequences.reserve(request.slot, request.num_tokens + count - 1)
        request.num_tokens += count
        self._simulated.extend(request.slot, count)

    def _prefill(self, steps: ForeseenSteps) -> None:
        """Compute the prompt chunks."""
        computed = Counter[Request]()
        for chunks in steps.chunks:
            for prompt, count in chunks.shares:
                computed[prompt.request] += count
        for request, count in computed.items():
            self.sequences.share(request.slot, request.num_computed_tokens + count)


def _kv_tokens(decodes: list[Request]) -> int:
    return sum(request.num_tokens - 1 for request in decodes)
