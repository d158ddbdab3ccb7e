"""Routers, which choose the engine for a request. They see what a real one would: requests, and their answers."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.protocol.simulation import SimulatedRequest, SimulationSetup

_MOST_SESSIONS = 1 << 17  # that a router remembers
_SESSION_BLOCKS = 2  # identify the session of a request that names none: more than a system prompt that all share
_BLEND = 0.02  # weight of one more answer in the mean length
_FIRST_ESTIMATE = 256.0  # output tokens, before any answer has ended


def prefix_keys(blocks: Sequence[int], block_tokens: int, prompt_tokens: int) -> list[int]:
    """Return a key for each prefix of a prompt that ends with a full block, the shortest first."""
    keys, key = [], block_tokens
    for block in blocks[: prompt_tokens // block_tokens]:
        key = hash((key, abs(block), block < 0))  # -1 and -2 have the same hash
        keys.append(key)
    return keys


class PrefixIndex:
    """A guess at an engine's prefix cache: the prefixes that were sent to it, as many blocks as its cache may hold.

    The least recent are forgotten; the engine forgets in another order when it also keeps answers, or runs many at a
    time.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def match(self, keys: Sequence[int]) -> int:
        """Return how many of the prefixes are present, from the shortest on."""
        for count, key in enumerate(keys):
            if key not in self._keys:
                return count
        return len(keys)

    def add(self, keys: Sequence[int]) -> None:
        """Add the prefixes of one prompt. A prefix is forgotten after its extensions."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._num_blocks:
            self._keys.popitem(last=False)


@dataclass(slots=True)
class EngineLoad:
    """A router's view of an engine: requests in flight, and the prompt tokens that are likely still to compute."""

    in_flight: int = 0
    prefills: dict[int, int] = field(default_factory=dict)  # prompt tokens of each request that has no first token yet
    prefill_tokens: int = 0

    def sent(self, request: SimulatedRequest, tokens: int) -> None:
        """Count a request that is on its way, with `tokens` of its prompt to compute."""
        self.in_flight += 1
        self.prefills[request.index] = tokens
        self.prefill_tokens += tokens

    def first_token(self, request: SimulatedRequest) -> None:
        """Note that a request's prompt is computed."""
        self.prefill_tokens -= self.prefills.pop(request.index, 0)

    def ended(self, request: SimulatedRequest) -> None:
        """Note that a request has its answer, or was rejected."""
        self.in_flight -= 1
        self.first_token(request)


class RoutingChoice(NamedTuple):
    """An engine, and the prompt tokens that it is likely to compute."""

    engine: int
    tokens: int


class Router(ABC):
    """Keeps count of each engine's load. Subclasses choose the engine."""

    def __init__(self, setup: SimulationSetup) -> None:
        self.setup = setup
        self.loads = [EngineLoad() for _ in range(setup.num_engines)]
        self._last = -1

    @abstractmethod
    def choose(self, request: SimulatedRequest) -> RoutingChoice:
        """Return the engine for a request that is sent now."""

    def send(self, request: SimulatedRequest) -> int:
        """Choose an engine and count the request as sent there."""
        self._last, tokens = self.choose(request)
        self.loads[self._last].sent(request, tokens)
        return self._last

    def first_token(self, request: SimulatedRequest, engine: int) -> None:
        """Note the first token of an answer."""
        self.loads[engine].first_token(request)

    def ended(self, request: SimulatedRequest, engine: int, output_tokens: int) -> None:
        """Note the end of an answer of `output_tokens` tokens."""
        del output_tokens
        self.loads[engine].ended(request)

    def least_loaded(self, engines: Iterable[int]) -> int:
        """Return the engine with the fewest requests in flight; of several, the next after the last choice."""
        return min(engines, key=lambda engine: (self.loads[engine].in_flight, self.turn(engine)))

    def turn(self, engine: int) -> int:
        """Return how many engines come before this one, counted from the one after the last choice."""
        return (engine - self._last - 1) % len(self.loads)


class RoundRobin(Router):
    """One engine after the other."""

    def choose(self, request: SimulatedRequest) -> RoutingChoice:
        """Choose the next engine."""
        return RoutingChoice((self._last + 1) % len(self.loads), request.prompt_tokens)


class LeastLoaded(Router):
    """The engine with the fewest requests in flight."""

    def choose(self, request: SimulatedRequest) -> RoutingChoice:
        """Choose the least loaded of all."""
        return RoutingChoice(self.least_loaded(range(len(self.loads))), request.prompt_tokens)


class PowerOfTwoChoices(Router):
    """The less loaded of two random engines."""

    def __init__(self, setup: SimulationSetup) -> None:
        super().__init__(setup)
        self._random = random.Random(setup.seed)

    def choose(self, request: SimulatedRequest) -> RoutingChoice:
        """Choose the less loaded of two."""
        size = len(self.loads)
        two = self._random.sample(range(size), min(2, size))
        return RoutingChoice(self.least_loaded(two), request.prompt_tokens)


class StickyBySession(Router):
    """A session stays on the engine that was the least loaded when it began.

    A request that names no session belongs to the one of prompts with the same first two blocks; a prompt that does
    not fill two blocks belongs to none.
    """

    def __init__(self, setup: SimulationSetup) -> None:
        super().__init__(setup)
        self._engines: OrderedDict[str | int, int] = OrderedDict()

    def choose(self, request: SimulatedRequest) -> RoutingChoice:
        """Choose the engine of the request's session."""
        session = self._session_of(request)
        engine = None if session is None else self._engines.pop(session, None)
        if engine is None:
            engine = self.least_loaded(range(len(self.loads)))
        if session is not None:
            self._engines[session] = engine
            if len(self._engines) > _MOST_SESSIONS:
                self._engines.popitem(last=False)
        return RoutingChoice(engine, request.prompt_tokens)

    @staticmethod
    def _session_of(request: SimulatedRequest) -> str | int | None:
        if request.session is not None:
            return request.session
        keys = prefix_keys(request.blocks[:_SESSION_BLOCKS], request.block_tokens, request.prompt_tokens)
        return keys[-1] if len(keys) == _SESSION_BLOCKS else None


class PrefixAffinity(Router):
    """The engine where the answer is likely to end first: a long cached prefix is traded against the load.

    The seconds of an answer are those of the prompt tokens to compute, those queued before it and its own that are not
    cached, and, for each output token, those that each concurrent request adds to a step.
    """

    def __init__(self, setup: SimulationSetup) -> None:
        super().__init__(setup)
        self._indexes: list[PrefixIndex] = []  # by engine, once the first request has shown the size of blocks
        self._output_tokens = _FIRST_ESTIMATE

    def choose(self, request: SimulatedRequest) -> RoutingChoice:
        """Choose the least expected time; of several engines, the next after the last choice."""
        keys = prefix_keys(request.blocks, request.block_tokens, request.prompt_tokens)
        indexes = self._indexes_for(request.block_tokens)
        most = request.prompt_tokens - 1  # one token is computed in any case
        left = [request.prompt_tokens - min(index.match(keys) * request.block_tokens, most) for index in indexes]
        engine = min(range(len(left)), key=lambda engine: (self._seconds(engine, left[engine]), self.turn(engine)))
        indexes[engine].add(keys)
        return RoutingChoice(engine, left[engine])

    def _seconds(self, engine: int, tokens: int) -> float:
        step, load = self.setup.step, self.loads[engine]
        others = step.decode * self._output_tokens * load.in_flight
        return step.prefill_token * (tokens + load.prefill_tokens) + others

    def ended(self, request: SimulatedRequest, engine: int, output_tokens: int) -> None:
        """Learn how long answers are."""
        super().ended(request, engine, output_tokens)
        if output_tokens:
            self._output_tokens += _BLEND * (output_tokens - self._output_tokens)

    def _indexes_for(self, block_tokens: int) -> list[PrefixIndex]:
        if not self._indexes:
            shape = self.setup.engine
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
