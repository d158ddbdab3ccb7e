"""The order in which grammars are compiled: groups of tenants take turns, and so do the tenants of a group.

A tenant has one grammar compiled at a time. A group, such as the connections of one address, has all threads but one at
most, and of two groups the one that has fewer goes first: a group that had none waits for none that begins later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from quire.engine_core.grammar.grammar import Grammar
from quire.engine_core.request import TenantName, group_of


class CompileTurns:
    """The grammars that wait, by group and tenant, and those that are being compiled. Its owner has a lock for it."""

    def __init__(self, num_threads: int) -> None:
        self._most_of_group = max(1, num_threads - 1)
        # In both dicts, the one whose turn it is comes first.
        self._waiting: dict[TenantName, dict[TenantName, dict[Grammar, None]]] = {}
        self._running: dict[Grammar, TenantName] = {}

    def add(self, tenant: TenantName, grammar: Grammar) -> None:
        """Let a grammar wait, unless it is being compiled. Several tenants may wait for the same one."""
        if grammar not in self._running:
            self._waiting.setdefault(group_of(tenant), {}).setdefault(tenant, {})[grammar] = None

    def take(self) -> Grammar | None:
        """Return the next grammar, now being compiled, or None if all that wait have to wait on."""
        num_running = Counter(map(group_of, self._running.values()))
        tenant = min(self._first_tenants(num_running), key=lambda each: num_running[group_of(each)], default=None)
        if tenant is None:
            return None
        group = group_of(tenant)
        tenants = self._waiting[group] = self._waiting.pop(group)
        tenants[tenant] = tenants.pop(tenant)
        grammar = next(iter(tenants[tenant]))
        self.remove(grammar)
        self._running[grammar] = tenant
        return grammar

    def end(self, grammar: Grammar) -> None:
        """Note that a grammar is no longer being compiled."""
        del self._running[grammar]

    def remove(self, grammar: Grammar) -> bool:
        """Let a grammar wait no longer; return False if it did not."""
        is_found = False
        for group, tenants in list(self._waiting.items()):
            for tenant in [tenant for tenant, grammars in tenants.items() if grammar in grammars]:
                is_found = True
                del tenants[tenant][grammar]
                if not tenants[tenant]:
                    del tenants[tenant]
            if not tenants:
                del self._waiting[group]
        return is_found

    def clear(self) -> list[Grammar]:
        """Let no grammar wait; return those that are being compiled."""
        self._waiting.clear()
        return list(self._running)

    def _first_tenants(self, num_running: Counter[TenantName]) -> Iterator[TenantName]:
        """Yield of each group that may have another grammar compiled the tenant whose turn it is."""
        busy = set(self._running.values())
        for group, tenants in self._waiting.items():
            first = next((tenant for tenant in tenants if tenant not in busy), None)
            if first is not None and num_running[group] < self._most_of_group:
                yield first
