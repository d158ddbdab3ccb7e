"""Fair shares: whose turn it is among the tenants that have waiting requests.

A counter for each tenant holds the tokens that the engine has spent on it, and the tenant with the least is next (Sheng
et al., Fairness in Serving Large Language Models, 2024). A request counts with its expected tokens when it starts, and
with its actual ones once it ends. A tenant that begins to wait is lifted to the counter of the one served last, as in
start-time fair queueing: an absence earns nothing. While no request waits, all are even.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from quire.engine_core.request import Request, TenantName
from quire.engine_core.scheduling.policies import Policy

Rank = tuple[int, float, int]
"""The level, the counter and the number of a tenant; the least is next."""

Arrange = Callable[[Iterable[Request]], Iterable[Request]]
"""Return the order in which to try the waiting requests of one tenant."""

_FEW = 64  # tenants that are remembered in any case


class Tenant:
    """One tenant: its waiting requests in the order of the policy's keys, and then of arrival, and its counter."""

    __slots__ = ("counter", "entries", "levels", "num_tokens", "num_waiting", "number", "rank", "since")

    def __init__(self, number: int) -> None:
        self.number = number
        self.entries: list[tuple[float, int, Request]] = []  # requests that can start
        self.levels: Counter[int] = Counter()  # of these
        self.num_waiting = 0  # those that are held included
        self.num_tokens = 0  # of their prompts
        self.counter = 0.0  # tokens
        self.since = 0.0  # when it was served last, or began to wait
        self.rank: Rank | None = None  # None: no request can start

    def ready(self) -> Iterator[Request]:
        """Return the requests that can start, in order."""
        return (request for _, _, request in self.entries)

    def add(self, request: Request, key: float, level: int) -> None:
        """Add a request that can start."""
        insort(self.entries, (key, request.number, request))
        self.levels[level] += 1

    def remove(self, request: Request, key: float, level: int) -> None:
        """Remove a request that can start; KeyError if it is not here."""
        index = bisect_left(self.entries, (key, request.number))
        if index == len(self.entries) or self.entries[index][2] is not request:
            raise KeyError(request.request_id)
        del self.entries[index]
        _take_one(self.levels, level)


class FairShares:
    """The tenants, and the order of those with requests that can start. `expected_tokens`: those of a request."""

    def __init__(self, policy: Policy, clock: Callable[[], float], expected_tokens: Callable[[Request], float]) -> None:
        self.num_waiting_tenants = 0
        self._policy = policy
        self._clock = clock
        self._expected_tokens = expected_tokens
        self._tenants: dict[TenantName, Tenant] = {}
        self._charged: dict[Request, float] = {}  # tokens, to the tenants of open requests
        self._max_tenants = _FEW
        self._num_tenants = 0  # ever
        self._order: list[tuple[Rank, Tenant]] = []
        self._served = 0.0  # the counter of the tenant that was served last, or more
        self._most = 0.0  # the highest counter so far

    def __bool__(self) -> bool:
        """Return True if a request can start."""
        return bool(self._order)

    def get(self, name: TenantName) -> Tenant | None:
        """Return a tenant, unless it is forgotten, as it has nothing waiting. May be called by any thread."""
        return self._tenants.get(name)

    def enter(self, request: Request) -> None:
        """Count a waiting request."""
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            self._forget_idle()
            self._num_tenants += 1
            tenant = self._tenants[request.tenant] = Tenant(self._num_tenants)
        self.num_waiting_tenants += tenant.num_waiting == 0
        tenant.num_waiting += 1
        tenant.num_tokens += request.num_prompt_tokens

    def leave(self, request: Request) -> None:
        """Stop counting a request, which waits no longer."""
        tenant = self._tenants[request.tenant]
        tenant.num_waiting -= 1
        tenant.num_tokens -= request.num_prompt_tokens
        if tenant.num_waiting == 0:
            self.num_waiting_tenants -= 1
            if tenant.counter <= self._served:
                del self._tenants[request.tenant]

    def add(self, request: Request) -> None:
        """Let a request that has entered start from now on."""
        tenant = self._tenants[request.tenant]
        if not tenant.entries:
            tenant.counter = max(tenant.counter, self._served)
            tenant.since = max(tenant.since, request.arrival)
        tenant.add(request, self._policy.key(request), self._policy.level(request))
        self._place(tenant)

    def remove(self, request: Request) -> None:
        """Let a request start no more; KeyError if it could not."""
        if (tenant := self._tenants.get(request.tenant)) is None:
            raise KeyError(request.request_id)
        tenant.remove(request, self._policy.key(request), self._policy.level(request))
        self._place(tenant)

    def charge(self, request: Request) -> None:
        """Charge the expected tokens of a request that has started to its tenant; cached ones cost nothing."""
        tenant = self._tenants[request.tenant]
        self._served = max(self._served, tenant.counter)
        tenant.since = self._clock()
        self._charge(tenant, request, self._expected_tokens(request) - request.num_cached_tokens)

    def charge_actual(self, request: Request) -> None:
        """Charge the actual tokens of a request that has started, in place of the expected ones."""
        tenant = self._tenants.get(request.tenant)
        if tenant is not None and self._charged.get(request):
            output = request.num_output_tokens * request.width
            self._charge(tenant, request, request.num_prompt_tokens - request.num_cached_tokens + output)

    def forget(self, request: Request) -> None:
        """Charge a request that ends by what it has taken."""
        self.charge_actual(request)
        self._charged.pop(request, None)

    def precedes(self, waiting: Request, running: Request) -> bool:
        """Return True unless the tenant of a running request would come before that of one that can start."""
        own, other = self._tenants[waiting.tenant], self._tenants.get(running.tenant)
        level = self._level([self._policy.level(running)], self._clock() if other is None else other.since)
        counter = self._served if other is None else max(self._served, other.counter)
        return own.rank is not None and own.rank[:2] <= (level, counter)

    def put_behind(self, request: Request, other: Request) -> None:
        """Let the tenant of a request that has given way come after that of another on the same level."""
        self.charge_actual(request)  # until it starts again
        tenant, first = self._tenants[request.tenant], self._tenants[other.tenant]
        if tenant.counter <= first.counter:
            tenant.counter = first.counter + 1.0
            self._place(tenant)

    def in_turn(self, arrange: Arrange) -> Iterable[Request]:
        """Return the requests that can start, of all tenants in turn, as if each one started when it is taken.

        They must not change meanwhile. A step takes few of many, so each tenant is arranged when its turn comes.
        """
        if len(self._order) > 1:
            return self._merge(arrange)
        return arrange(self._order[0][1].ready()) if self._order else ()

    def _merge(self, arrange: Arrange) -> Iterator[Request]:
        tenants = iter(self._order)
        coming = next(tenants, None)
        turns: list[tuple[Rank, _Turns]] = []  # a heap of the tenants that have had a turn
        while turns or coming is not None:
            if coming is not None and (not turns or coming[0] < turns[0][0]):
                turn = _Turns(coming[1], iter(arrange(coming[1].ready())))
                coming = next(tenants, None)
            else:
                turn = heapq.heappop(turns)[1]
            if (request := next(turn.requests, None)) is not None:
                yield request
                turn.counter += self._expected_tokens(request) - self._charged.get(request, 0.0)
                _take_one(turn.levels, self._policy.level(request))
                if turn.levels:
                    level = self._level(turn.levels, self._clock())
                    heapq.heappush(turns, ((level, turn.counter, turn.number), turn))

    def _charge(self, tenant: Tenant, request: Request, tokens: float) -> None:
        tenant.counter += tokens - self._charged.get(request, 0.0)
        self._charged[request] = tokens
        self._most = max(self._most, tenant.counter)
        self._place(tenant)

    def _level(self, levels: Iterable[int], since: float) -> int:
        """Return the level of a tenant that has requests of these levels, and has not been served since then."""
        return min(levels) + int(since / self._policy.aging_seconds)

    def _place(self, tenant: Tenant) -> None:
        """Put a tenant where it belongs in the order; it has changed."""
        rank = None
        if tenant.entries:
            rank = self._level(tenant.levels, tenant.since), tenant.counter, tenant.number
        if rank == tenant.rank:
            return
        if tenant.rank is not None:
            del self._order[bisect_left(self._order, (tenant.rank,))]
        if rank is not None:
            insort(self._order, (rank, tenant))
        elif not self._order:
            self._served = self._most
        tenant.rank = rank

    def _forget_idle(self) -> None:
        """Forget tenants that begin anew anyway, when they may outnumber the others."""
        if len(self._tenants) < self._max_tenants:
            return
        self._tenants = {
            name: tenant
            for name, tenant in self._tenants.items()
            if tenant.num_waiting or tenant.counter > self._served
        }
        self._max_tenants = max(_FEW, 2 * len(self._tenants))


class _Turns:
    """The turns of a tenant while requests are taken, until they have really started."""

    __slots__ = ("counter", "levels", "number", "requests")

    def __init__(self, tenant: Tenant, requests: Iterator[Request]) -> None:
        self.requests = requests
        self.counter = tenant.counter
        self.number = tenant.number
        self.levels = tenant.levels.copy()  # of the requests that are left


def _take_one(levels: Counter[int], level: int) -> None:
    levels[level] -= 1
    if not levels[level]:
        del levels[level]
