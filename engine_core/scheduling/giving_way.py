"""Giving way: when all slots or pages are taken, a tenant that holds many gives some up for one that holds few.

Without that, the first token of one would wait until a long generation of another ends. What gives way has lost little:
its full pages stay in the prefix cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quire.engine_core.request import Request


@dataclass(frozen=True, slots=True)
class Blocked:
    """A waiting request whose turn it is, and the slots and pages that it lacks to start."""

    request: Request
    slots: int = 0
    pages: int = 0


def victims_for(
    blocked: Blocked,
    running: Mapping[Request, int],
    precedes: Callable[[Request, Request], bool],
    cost: Callable[[Request], tuple[int, ...]],
) -> list[Request]:
    """Return the running requests that give way to one that waits, none if it has to wait on.

    They belong to the tenants that hold the most slots, each of which still holds as many as the other tenant will, or
    twice as many if that one has some already: turns decide about the rest, and no two ever preempt each other.
    `running`: with the tokens that each had when it started. `precedes` tells whose turn it would be if both waited; of
    one tenant, those with the least `cost` give way. A beam search would begin anew, so it never does.
    """
    request = blocked.request
    held = Counter[object]()
    for each in running:
        held[each.tenant] += each.decoding.width
    own = held[request.tenant]
    most = _FACTOR * (own + request.width) if own else request.width
    by_tenant: dict[object, list[Request]] = {}
    may_give_way = [each for each, num_before in running.items() if _may_give_way(each, num_before, request)]
    for each in sorted(may_give_way, key=cost, reverse=True):
        if precedes(request, each):
            by_tenant.setdefault(each.tenant, []).append(each)
    victims: list[Request] = []
    slots, pages = blocked.slots, blocked.pages
    while slots > 0 or pages > 0:
        tenant = max(by_tenant, key=held.__getitem__, default=None)
        if tenant is None or held[tenant] <= most:
            return []
        victim = by_tenant[tenant].pop()
        if not by_tenant[tenant]:
            del by_tenant[tenant]
        held[tenant] -= victim.width
        slots -= victim.width
        pages -= cost(victim)[_PAGES]
        victims.append(victim)
    return victims


_PAGES = 2  # of its cost: those that no other request holds
_FACTOR = 2
_LEAST_TOKENS = 16  # that it has generated since it started: the rest of a page may have to be computed again


def _may_give_way(running: Request, num_before: int, waiting: Request) -> bool:
    if running.tenant == waiting.tenant or running.num_tokens - num_before < _LEAST_TOKENS:
        return False
    return running.width == 1 and not running.needs_every_token
