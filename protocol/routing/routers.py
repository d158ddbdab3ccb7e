"""Routers, which choose an engine for each request: those of a live set of engines, and of simulated ones.

They see what a client sees: its requests, the answers to them, and what engines report of their steps and caches.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quire.protocol.messages import PrefixReport, SchedulerStats
from quire.protocol.routing.prefix_outline import PrefixOutline, page_keys
from quire.protocol.routing.step_costs import StepCosts

MAX_SESSIONS = 1 << 17
"""Sessions that a router remembers."""

MAX_ADAPTERS = 4096
"""Adapters of which a router remembers the engine."""

_SESSION_TOKENS = 1024  # identify the session of a request that names none: more than a system prompt that all share
_BLEND = 0.02  # weight of one more answer in the mean length
_FIRST_ESTIMATE = 256.0  # output tokens, before any answer has ended
_ABOUT = 1.05  # costs that differ by less count as the same: their estimates are not better
_LEAST_FETCHED = 64  # tokens: for fewer it is not worth asking another engine
_MOST_DELAYED = 4.0  # requests: under overload a queue must still be worth more than a prefix

Reason = Literal["turn", "load", "session", "prefix"]
"""Why an engine was chosen: it was the next, it had the least to do, it has the session, or it has the prefix."""


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request as its router knows it, and where it was sent.

    `read` returns the tokens of the prompt. `num_answers`: sequences that decode. `session`: name of a conversation,
    which its client has given, None without one. `adapter`: that which computes it, "" for none; `salt` names it too.
    """

    num_tokens: int
    read: Callable[[], Sequence[int]]
    salt: str = ""
    session: str | None = None
    num_answers: int = 1
    adapter: str = ""
    engine: int | None = None
    reason: Reason = "turn"
    cached_tokens: int = 0  # tokens that the engine was believed to have when the request was sent
    source: int | None = None  # another engine, from which this one may fetch more of the prompt's prefix
    waits_for: int = 0  # prompt tokens that the engine is likely still to compute
    prefixes: dict[int, list[int]] = field(default_factory=dict)  # their keys by block size, while an engine is chosen
    expected: list[int] = field(default_factory=list)  # keys of prefixes that the engine will have


@dataclass(slots=True)
class EngineLoad:
    """A router's view of an engine.

    `in_flight`: sequences; `prefills`: requests without a first token; `prefill_tokens`: prompt tokens that are likely
    still to compute.
    """

    in_flight: int = 0
    prefills: int = 0
    prefill_tokens: int = 0


class RoutingChoice(NamedTuple):
    """An engine, why it was chosen, what it has cached, and another engine that has more of it."""

    engine: int
    reason: Reason
    cached_tokens: int = 0
    source: int | None = None


class Router(ABC):
    """Keeps count of each engine's load. Subclasses choose the engine.

    Engines are numbers. `watches_prefixes`: it wants reports of what engines have in their caches. `can_fetch`: engines
    can fetch prefixes from one another.
    """

    watches_prefixes = False
    can_fetch = False

    def __init__(self, seed: int = 0) -> None:
        """`seed` is for those that choose by chance."""
        del seed
        self.loads: dict[int, EngineLoad] = {}
        self._last = -1
        self._adapter_engines: OrderedDict[str, int] = OrderedDict()  # those that had a request of an adapter last

    @abstractmethod
    def choose(self, request: RoutedRequest, engines: Sequence[int]) -> RoutingChoice:
        """Return the choice among some engines, at least one, for a request that is sent now."""

    def add(self, engine: int, block_size: int) -> None:
        """Add an engine without load, whose pages have `block_size` tokens."""
        del block_size
        self.loads[engine] = EngineLoad()

    def remove(self, engine: int) -> None:
        """Remove an engine; its requests are to be taken back, now or later."""
        del self.loads[engine]

    def send(self, request: RoutedRequest, engines: Sequence[int] | None = None) -> int:
        """Choose one of these engines, None for all, and count the request as sent there."""
        engines = sorted(self.loads) if engines is None else engines
        choice = self.choose(request, engines) if len(self.loads) > 1 else RoutingChoice(engines[0], "turn")
        request.engine, request.reason, request.cached_tokens, request.source = choice
        request.waits_for = request.num_tokens - choice.cached_tokens
        self._last = choice.engine
        self._note_adapter(request.adapter, choice.engine)
        load = self.loads[choice.engine]
        load.in_flight += request.num_answers
        load.prefills += 1
        load.prefill_tokens += request.waits_for
        return choice.engine

    def first_token(self, request: RoutedRequest) -> None:
        """Note that a request's prompt is computed. Repeated, it has no effect."""
        if request.engine is None or not request.waits_for:
            return
        if (load := self.loads.get(request.engine)) is not None:
            load.prefills -= 1
            load.prefill_tokens -= request.waits_for
        request.waits_for = 0

    def take_back(self, request: RoutedRequest) -> None:
        """Note that a request is at no engine any more. Repeated, it has no effect."""
        self.first_token(request)
        if request.engine is not None and (load := self.loads.get(request.engine)) is not None:
            load.in_flight -= request.num_answers
        request.engine = None

    def ended(self, request: RoutedRequest, output_tokens: int) -> None:
        """Note the end of a request whose answers have so many tokens."""
        del output_tokens
        self.take_back(request)

    def observe(self, engine: int, stats: SchedulerStats) -> None:
        """Take note of an engine's step. Any thread; without effect if the engine is not there."""
        del engine, stats

    def report(self, engine: int, report: PrefixReport) -> None:
        """Take note of what has changed in an engine's prefix cache. Any thread; without effect if it is not there."""
        del engine, report

    def _note_adapter(self, adapter: str, engine: int) -> None:
        if not adapter:
            return
        self._adapter_engines[adapter] = engine
        self._adapter_engines.move_to_end(adapter)
        if len(self._adapter_engines) > MAX_ADAPTERS:
            self._adapter_engines.popitem(last=False)

    def least_loaded(self, engines: Iterable[int]) -> int:
        """Return the engine with the fewest sequences in flight; of several, the next after the last choice."""
        return min(engines, key=lambda engine: (self.loads[engine].in_flight, *self.turn(engine)))

    def turn(self, engine: int) -> tuple[bool, int]:
        """Return a value by which to sort engines from the one after the last choice on."""
        return engine <= self._last, engine


class RoundRobin(Router):
    """One engine after the other."""

    def choose(self, request: RoutedRequest, engines: Sequence[int]) -> RoutingChoice:
        """Choose the next engine."""
        del request
        return RoutingChoice(min(engines, key=self.turn), "turn")


class LeastLoaded(Router):
    """The engine with the fewest sequences in flight."""

    def choose(self, request: RoutedRequest, engines: Sequence[int]) -> RoutingChoice:
        """Choose the least loaded of all."""
        del request
        return RoutingChoice(self.least_loaded(engines), "load")


class PowerOfTwoChoices(Router):
    """The less loaded of two random engines."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._random = random.Random(seed)

    def choose(self, request: RoutedRequest, engines: Sequence[int]) -> RoutingChoice:
        """Choose the less loaded of two."""
        del request
        two = self._random.sample(list(engines), min(2, len(engines)))
        return RoutingChoice(self.least_loaded(two), "load")


class StickyBySession(Router):
    """A session stays on the engine that was the least loaded when it began, as long as that can take requests.

    A request that names no session belongs to the one of prompts with the same first 1,024 tokens; a shorter prompt
    belongs to none.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._engines: OrderedDict[str | int, int] = OrderedDict()

    def choose(self, request: RoutedRequest, engines: Sequence[int]) -> RoutingChoice:
        """Choose the engine of the request's session."""
        session = self._session_of(request)
        if session is None:
            return RoutingChoice(self.least_loaded(engines), "load")
        engine = self._engines.pop(session, None)
        has_session = engine in engines
        if engine is None or not has_session:
            engine = self.least_loaded(engines)
        self._engines[session] = engine
        if len(self._engines) > MAX_SESSIONS:
            self._engines.popitem(last=False)
        return RoutingChoice(engine, "session" if has_session else "load")

    @staticmethod
    def _session_of(request: RoutedRequest) -> str | int | None:
        if request.session is not None:
            return f"{request.salt}\n{request.session}"
        if request.num_tokens < _SESSION_TOKENS:
            return None
        (key,) = page_keys(request.salt, request.read()[:_SESSION_TOKENS], _SESSION_TOKENS)
        return key


class PrefixAffinity(Router):
    """The engine with the least cost of an answer: a long cached prefix is traded against the load.

    The cost is the seconds until the answer ends: those of the prompt tokens to compute, the ones queued before it and
    its own that are not cached, and, for each output token, those that each concurrent sequence adds to a step. They
    are learned. The seconds of its own tokens count again for each later request that they delay: as many, presumably,
    as wait at an engine now. Of engines with about the same cost, the one with the longest cached prefix is chosen, or
    the one that had a request of the same adapter last: what it has cached for an adapter is not known.
    """

    watches_prefixes = True

    def __init__(self, seed: int = 0, outline: PrefixOutline | None = None) -> None:
        super().__init__(seed)
        self.outline = PrefixOutline() if outline is None else outline
        self.costs: dict[int, StepCosts] = {}
        self._all_costs = StepCosts()
        self._learning = threading.Lock()
        self._block_sizes: dict[int, int] = {}
        self._output_tokens = _FIRST_ESTIMATE

    def add(self, engine: int, block_size: int) -> None:
        """Add an engine with an empty cache."""
        super().add(engine, block_size)
        self.costs[engine] = StepCosts(self._all_costs)
        self._block_sizes[engine] = block_size
        self.outline.add(engine, block_size)

    def remove(self, engine: int) -> None:
        """Remove an engine with what it has cached."""
        super().remove(engine)
        del self._block_sizes[engine], self.costs[engine]
        self.outline.remove(engine)

    def choose(self, request: RoutedRequest, engines: Sequence[int]) -> RoutingChoice:
        """Choose the least cost; of several engines, the next after the last choice."""
        most = request.num_tokens - 1  # the last token is computed in any case, with its page
        keys = {size: each[: most // size] for size, each in request.prefixes.items()}
        cached = self.outline.match(keys)
        costs = self._costs(engines, request.num_tokens, cached)
        enough = min(costs) * _ABOUT
        near = [engine for engine, cost in zip(engines, costs, strict=True) if cost <= enough]
        longest = max(cached.get(engine, 0) for engine in near)
        last = self._adapter_engines.get(request.adapter)
        alike = [engine for engine in near if cached.get(engine, 0) == longest]
        engine = last if last in alike else min(alike, key=self.turn)
        return RoutingChoice(engine, "prefix" if longest else "load", longest, self._source(longest, cached, keys))

    def _source(self, longest: int, cached: Mapping[int, int], keys: Mapping[int, Sequence[int]]) -> int | None:
        """Return an engine that has enough more than `longest` tokens of a prompt to fetch them from there, if any."""
        least = longest + _LEAST_FETCHED
        if not self.can_fetch or max(cached.values(), default=0) < least:
            return None
        stored = self.outline.match(keys, only_stored=True)
        found = max(stored, key=stored.__getitem__, default=None)
        return None if found is None or stored[found] < least else found

    def send(self, request: RoutedRequest, engines: Sequence[int] | None = None) -> int:
        """Choose an engine, and expect it to have the prompt from now on."""
        if len(self.loads) > 1:
            request.prefixes = self.outline.prefixes(request.salt, request.read())
        engine = super().send(request, engines)
        request.expected = request.prefixes.get(self._block_sizes[engine], [])
        request.prefixes = {}
        self.outline.expect(engine, request.expected)
        return engine

    def first_token(self, request: RoutedRequest) -> None:
        """Note that a request's prompt is computed, which the engine reports itself."""
        super().first_token(request)
        if request.engine is not None and request.expected:
            self.outline.expect_no_more(request.engine, request.expected)
            request.expected = []

    def ended(self, request: RoutedRequest, output_tokens: int) -> None:
        """Learn how long answers are."""
        super().ended(request, output_tokens)
        if output_tokens:
            self._output_tokens += _BLEND * (output_tokens / request.num_answers - self._output_tokens)

    def observe(self, engine: int, stats: SchedulerStats) -> None:
        """Learn how long steps take."""
        with self._learning:
            if (costs := self.costs.get(engine)) is not None:
                costs.observe(stats)
                self._all_costs.observe(stats)

    def report(self, engine: int, report: PrefixReport) -> None:
        """Take note of what has changed in an engine's prefix cache."""
        self.outline.report(engine, report)

    def _costs(self, engines: Sequence[int], num_tokens: int, cached: Mapping[int, int]) -> list[float]:
        """Return the cost of an answer at each engine, to a prompt of which each has so many tokens cached."""
        weight = 1 + min(_MOST_DELAYED, sum(load.prefills for load in self.loads.values()) / len(self.loads))
        found, output_tokens = [], self._output_tokens
        for engine in engines:
            load, (_, prefill, decode) = self.loads[engine], self.costs[engine].seconds
            tokens = weight * (num_tokens - cached.get(engine, 0)) + load.prefill_tokens
            found.append(prefill * tokens + decode * output_tokens * load.in_flight)
        return found


ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "power-of-two": PowerOfTwoChoices,
    "sticky": StickyBySession,
    "prefix-affinity": PrefixAffinity,
}
