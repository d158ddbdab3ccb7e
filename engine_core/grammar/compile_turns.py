"""The order in which grammars are compiled: tenants take turns, and each has one compiled at a time."""

from __future__ import annotations

from quire.engine_core.grammar.grammar import Grammar
from quire.engine_core.request import TenantName


class CompileTurns:
    """The grammars that wait, by tenant, and those that are being compiled. Its owner has a lock for it."""

    def __init__(self) -> None:
        self._waiting: dict[TenantName, dict[Grammar, None]] = {}  # the tenant whose turn it is comes first
        self._running: dict[Grammar, TenantName] = {}

    def add(self, tenant: TenantName, grammar: Grammar) -> None:
        """Let a grammar wait, unless it is being compiled. Several tenants may wait for the same one."""
        if grammar not in self._running:
            self._waiting.setdefault(tenant, {})[grammar] = None

    def take(self) -> Grammar | None:
        """Return the next grammar, now being compiled, or None if all tenants that wait have one already."""
        busy = set(self._running.values())
        tenant = next((tenant for tenant in self._waiting if tenant not in busy), None)
        if tenant is None:
            return None
        grammar = next(iter(self._waiting[tenant]))
        self._waiting[tenant] = self._waiting.pop(tenant)
        self.remove(grammar)
        self._running[grammar] = tenant
        return grammar

    def end(self, grammar: Grammar) -> None:
        """Note that a grammar is no longer being compiled."""
        del self._running[grammar]

    def remove(self, grammar: Grammar) -> bool:
        """Let a grammar wait no longer; return False if it did not."""
        tenants = [tenant for tenant, grammars in self._waiting.items() if grammar in grammars]
        for tenant in tenants:
            del self._waiting[tenant][grammar]
            if not self._waiting[tenant]:
                del self._waiting[tenant]
        return bool(tenants)

    def clear(self) -> list[Grammar]:
        """Let no grammar wait; return those that are being compiled."""
        self._waiting.clear()
        return list(self._running)
