"""Which engine of a fleet gets a request. A router sees what a real one would: requests, and the answers to them."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from quire.engine_core.simulation.engine_load import EngineLoad
from quire.engine_core.simulation.prefix_index import PrefixIndex, prefix_keys
from quire.protocol.engine_shape import EngineShape
from quire.protocol.simulation import SimulatedRequest, StepTime

_MOST_SESSIONS = 1 << 17  # that a router remembers
_SESSION_BLOCKS = 2  # name the session of a request that has none: more than a system prompt that all share
_BLEND = 0.02  # weight of one more answer in the mean length
_FIRST_ESTIMATE = 256.0  # output tokens, before any answer has ended


@dataclass(frozen=True, slots=True)
class FleetShape:
    """What a router is told of the engines, which are all alike, and the seed of what it draws."""

    num_engines: int
    engine: EngineShape
    step: StepTime
    seed: int = 0


class Choice(NamedTuple):
    """An engine, and what is likely to be computed of the prompt there, in tokens."""

    engine: int
    tokens: int


class Router(ABC):
    """Keeps count of each engine's load. Those that choose only have to say whom."""

    def __init__(self, fleet: FleetShape) -> None:
        self.fleet = fleet
        self.loads = [EngineLoad() for _ in range(fleet.num_engines)]
        self._last = -1

    @abstractmethod
    def choose(self, request: SimulatedRequest) -> Choice:
        """The engine for a request that is sent now."""

    def send(self, request: SimulatedRequest) -> int:
        """Chooses an engine and counts the request as sent there."""
        self._last, tokens = self.choose(request)
        self.loads[self._last].sent(request, tokens)
        return self._last

    def first_token(self, request: SimulatedRequest, engine: int) -> None:
        """The first token of an answer has come."""
        self.loads[engine].first_token(request)

    def ended(self, request: SimulatedRequest, engine: int, output_tokens: int) -> None:
        """An answer has ended, with so many tokens."""
        del output_tokens
        self.loads[engine].ended(request)

    def least_loaded(self, engines: Iterable[int]) -> int:
        """Who has the fewest requests in flight; of several, the next one after who was chosen last."""
        return min(engines, key=lambda engine: (self.loads[engine].in_flight, self.turn(engine)))

    def turn(self, engine: int) -> int:
        """How many come before it, counted from the one after who was chosen last."""
        return (engine - self._last - 1) % len(self.loads)


class RoundRobin(Router):
    """One after the other."""

    def choose(self, request: SimulatedRequest) -> Choice:
        """The next one."""
        return Choice((self._last + 1) % len(self.loads), request.prompt_tokens)


class LeastLoaded(Router):
    """Who has the fewest requests in flight."""

    def choose(self, request: SimulatedRequest) -> Choice:
        """The least loaded of all."""
        return Choice(self.least_loaded(range(len(self.loads))), request.prompt_tokens)


class PowerOfTwoChoices(Router):
    """The less loaded of two that are drawn."""

    def __init__(self, fleet: FleetShape) -> None:
        super().__init__(fleet)
        self._random = random.Random(fleet.seed)

    def choose(self, request: SimulatedRequest) -> Choice:
        """The less loaded of two."""
        size = len(self.loads)
        two = self._random.sample(range(size), min(2, size))
        return Choice(self.least_loaded(two), request.prompt_tokens)


class StickyBySession(Router):
    """A session stays where it began, with who was the least loaded then.

    A request that names no session belongs with those whose prompts begin with the same two blocks; one whose prompt
    does not fill as much belongs with nobody.
    """

    def __init__(self, fleet: FleetShape) -> None:
        super().__init__(fleet)
        self._engines: OrderedDict[str | int, int] = OrderedDict()

    def choose(self, request: SimulatedRequest) -> Choice:
        """Where its session is."""
        session = self._session_of(request)
        engine = None if session is None else self._engines.pop(session, None)
        if engine is None:
            engine = self.least_loaded(range(len(self.loads)))
        if session is not None:
            self._engines[session] = engine
            if len(self._engines) > _MOST_SESSIONS:
                self._engines.popitem(last=False)
        return Choice(engine, request.prompt_tokens)

    @staticmethod
    def _session_of(request: SimulatedRequest) -> str | int | None:
        if request.session is not None:
            return request.session
        keys = prefix_keys(request.blocks[:_SESSION_BLOCKS], request.block_tokens, request.prompt_tokens)
        return keys[-1] if len(keys) == _SESSION_BLOCKS else None


class PrefixAffinity(Router):
    """Where the answer is likely to end first: a long cached prefix is traded against what waits and runs there.

    The seconds of an answer are those of the prompt tokens to compute, which are the ones before it and its own that
    are not cached, and, for each token, those that each request beside it adds to a step.
    """

    def __init__(self, fleet: FleetShape) -> None:
        super().__init__(fleet)
        self._indexes: list[PrefixIndex] = []  # by engine, once the first request has told the size of blocks
        self._output_tokens = _FIRST_ESTIMATE

    def choose(self, request: SimulatedRequest) -> Choice:
        """The least expected time; of several, the next one after who was chosen last."""
        keys = prefix_keys(request.blocks, request.block_tokens, request.prompt_tokens)
        indexes = self._indexes_for(request.block_tokens)
        most = request.prompt_tokens - 1  # one token is computed in any case
        left = [request.prompt_tokens - min(index.match(keys) * request.block_tokens, most) for index in indexes]
        engine = min(range(len(left)), key=lambda engine: (self._seconds(engine, left[engine]), self.turn(engine)))
        indexes[engine].add(keys)
        return Choice(engine, left[engine])

    def _seconds(self, engine: int, tokens: int) -> float:
        step, load = self.fleet.step, self.loads[engine]
        beside = step.decode * self._output_tokens * load.in_flight
        return step.prefill_token * (tokens + load.prefill_tokens) + beside

    def ended(self, request: SimulatedRequest, engine: int, output_tokens: int) -> None:
        """Learns how long answers are."""
        super().ended(request, engine, output_tokens)
        if output_tokens:
            self._output_tokens += _BLEND * (output_tokens - self._output_tokens)

    def _indexes_for(self, block_tokens: int) -> list[PrefixIndex]:
        if not self._indexes:
            shape = self.fleet.engine
            num_blocks = max(1, shape.num_pages * shape.block_size // block_tokens)
            self._indexes = [PrefixIndex(num_blocks) for _ in self.loads]
        return self._indexes


ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "power-of-two": PowerOfTwoChoices,
    "sticky": StickyBySession,
    "prefix-affinity": PrefixAffinity,
}
