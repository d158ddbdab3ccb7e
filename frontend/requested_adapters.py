"""The adapters that requests of this process name."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TypeGuard

from quire.frontend.hub.adapters import known_adapter
from quire.frontend.lora_request import LoRARequest

MAX_NAMED = 4096
"""Names of adapters that are kept, those that were used last."""


class RequestedAdapters:
    """Finds the adapters of requests, at the hub if need be, and keeps their names. Any thread."""

    def __init__(self, download_dir: str | None = None) -> None:
        """`download_dir`: as for a model."""
        self._download_dir = download_dir
        self._lock = threading.Lock()  # of what follows
        self._paths: dict[str, str] = {}  # by name, the one that was used last at the end

    def resolved(self, adapter: LoRARequest | None) -> LoRARequest | None:
        """Return an adapter of a request with its folder in the place of a name at the hub. Raises `HubError`."""
        if not _has_hub_name(adapter):
            return adapter
        return replace(adapter, lora_path=known_adapter(adapter.lora_path, self._download_dir).result())

    async def resolved_meanwhile(self, adapter: LoRARequest | None) -> LoRARequest | None:
        """Return the same, while the event loop goes on."""
        if not _has_hub_name(adapter):
            return adapter
        found = known_adapter(adapter.lora_path, self._download_dir)
        return replace(adapter, lora_path=await asyncio.wrap_future(found))

    def note(self, adapter: LoRARequest) -> None:
        """Keep the name of an adapter that a request has, whose path is that of its files."""
        with self._lock:
            self._paths.pop(adapter.lora_name, None)
            self._paths[adapter.lora_name] = adapter.lora_path
            if len(self._paths) > MAX_NAMED:
                del self._paths[next(iter(self._paths))]

    @property
    def paths(self) -> dict[str, str]:
        """The path of each adapter that requests had, by its name."""
        with self._lock:
            return dict(self._paths)


def _has_hub_name(adapter: object) -> TypeGuard[LoRARequest]:
    return isinstance(adapter, LoRARequest) and not adapter.lora_path.startswith("/")
