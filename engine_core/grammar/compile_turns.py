"""The order in which grammars are compiled: tenants take turns, and each has one compiled at a time.

Long grammars are compiled `MAX_LONG` at a time: a client whose connections are many tenants leaves a thread to the
short ones of others.
"""

from __future__ import annotations

from quire.engine_core.grammar.grammar import Grammar
from quire.engine_core.request import TenantName

MAX_LONG = 3
_LONG = 8192  # characters


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
        """Return the next grammar, now being compiled, or None if all that wait have to wait on."""
        busy = set(self._running.values())
        has_room = sum(map(_is_long, self._running)) < MAX_LONG
        first = ((tenant, next(iter(grammars))) for tenant, grammars in self._waiting.items() if tenant not in busy)
        found = next(((tenant, grammar) for tenant, grammar in first if has_room or not _is_long(grammar)), None)
        if found is None:
            return None
        tenant, grammar = found
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


def _is_long(grammar: Grammar) -> bool:
    return len(grammar.key[1]) > _LONG
