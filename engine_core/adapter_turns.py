"""The order in which adapters are read: groups of tenants take turns, and so do the tenants of a group."""

from __future__ import annotations

from quire.engine_core.request import Request, TenantName, group_of


class AdapterTurns:
    """The waiting requests whose adapters are still to be read, by group and tenant."""

    def __init__(self) -> None:
        # In all three dicts, the one whose turn it is comes first.
        self._waiting: dict[TenantName, dict[TenantName, dict[Request, None]]] = {}

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        self._waiting.setdefault(group_of(request.tenant), {}).setdefault(request.tenant, {})[request] = None

    def remove(self, request: Request) -> None:
        """Let a request wait no longer, if it does."""
        group = group_of(request.tenant)
        tenants = self._waiting.get(group, {})
        requests = tenants.get(request.tenant, {})
        requests.pop(request, None)
        if not requests:
            tenants.pop(request.tenant, None)
        if not tenants:
            self._waiting.pop(group, None)

    def take(self) -> Request | None:
        """Remove and return the request whose turn it is; None if none waits."""
        group = next(iter(self._waiting), None)
        if group is None:
            return None
        tenants = self._waiting[group] = self._waiting.pop(group)
        tenant = next(iter(tenants))
        requests = tenants[tenant] = tenants.pop(tenant)
        request = next(iter(requests))
        self.remove(request)
        return request
