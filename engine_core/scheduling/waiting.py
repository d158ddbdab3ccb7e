"""The queue of waiting requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from quire.engine_core.request import Request, TenantName
from quire.engine_core.scheduling.fairness import FairShares
from quire.engine_core.scheduling.policies import MatchOf, Policy
from quire.kernels.runner import Sequences


class WaitingQueue:
    """Requests of all tenants, which take fair turns; those of one tenant in the order of its policy.

    Some are held, as they can't start yet whatever their place; they count as waiting. `expected_tokens`: those
    that a request costs, by an estimate.
    """

    def __init__(self, policy: Policy, clock: Callable[[], float], expected_tokens: Callable[[Request], float]) -> None:
        self.policy = policy
        self._shares = FairShares(policy, clock, expected_tokens)
        self._held: dict[Request, None] = {}
        self._num_requests = 0
        self.num_tokens = 0  # of their prompts

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        yield from self.ready()
        yield from self._held

    @property
    def num_held(self) -> int:
        """Number of held requests."""
        return len(self._held)

    @property
    def num_tenants(self) -> int:
        """Number of tenants that have a waiting request."""
        return self._shares.num_waiting_tenants

    @property
    def has_ready(self) -> bool:
        """True if one of them can start."""
        return bool(self._shares)

    def ready(self) -> Iterable[Request]:
        """Return the requests that can start, in the order of keys and turns."""
        return self._shares.in_turn(lambda waiting: waiting)

    def arranged(self, match_of: MatchOf, sequences: Sequences) -> Iterable[Request]:
        """Return the requests that can start, in the order in which to try them. They must not change meanwhile."""
        return self._shares.in_turn(lambda waiting: self.policy.arrange(waiting, match_of, sequences))

    def precedes(self, waiting: Request, running: Request) -> bool:
        """Return True if it would not be the turn of a running request's tenant before that of a waiting one."""
        return self._shares.precedes(waiting, running)

    def put_behind(self, request: Request, other: Request) -> None:
        """Let the tenant of a request that has given way have its turn after that of another. Both can start."""
        self._shares.put_behind(request, other)

    def load_of(self, tenant: TenantName) -> tuple[int, int]:
        """Return how many requests of a tenant wait, and the tokens of their prompts. May be called by any thread."""
        found = self._shares.get(tenant)
        return (0, 0) if found is None else (found.num_waiting, found.num_tokens)

    def hold(self, request: Request) -> None:
        """Queue a request that can't start until it is removed and added."""
        self._enter(request)
        self._held[request] = None

    def add(self, request: Request) -> None:
        """Queue a request by the policy's key."""
        self._enter(request)
        self._shares.add(request)

    def remove(self, request: Request) -> None:
        """Remove a request, held or not; KeyError if it is not here."""
        if request in self._held:
            del self._held[request]
        else:
            self._shares.remove(request)
        self._leave(request)

    def note_admitted(self, requests: Iterable[Request]) -> None:
        """Let the policy note which of the arranged requests were admitted; they still wait."""
        by_tenant: defaultdict[TenantName, list[Request]] = defaultdict(list)
        for request in requests:
            by_tenant[request.tenant].append(request)
        for name, own in by_tenant.items():
            if (tenant := self._shares.get(name)) is not None:
                self.policy.admitted(tenant.ready(), own)

    def start(self, request: Request) -> None:
        """Remove a request that has started, and charge it to its tenant."""
        self._shares.charge(request)
        self.remove(request)

    def forget(self, request: Request) -> None:
        """Charge a request that ends by what it has taken."""
        self._shares.forget(request)
        self.policy.forget(request)

    def _enter(self, request: Request) -> None:
        self._shares.enter(request)
        self._num_requests += 1
        self.num_tokens += request.num_prompt_tokens

    def _leave(self, request: Request) -> None:
        self._shares.leave(request)
        self._num_requests -= 1
        self.num_tokens -= request.num_prompt_tokens
