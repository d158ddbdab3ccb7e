"""LoRA adapters of requests: read on a thread while steps go on, kept while there is room, pinned while in use.

An adapter has a number, which the rows of its requests carry to the kernels. Pages of the prefix cache belong to what
its files contain: two folders with the same contents share them.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from quire.engine_core.feature import Feature
from quire.engine_core.request import Request, RequestStatus
from quire.engine_core.validation import RejectedError
from quire.kernels.adapters.packing import PackedAdapter
from quire.kernels.errors import ModelError
from quire.protocol.messages import EngineCoreRequest, FinishReason


class AdapterLoader(Protocol):
    """Reads adapters, and lets the kernels have them."""

    def read_adapter(self, path: Path) -> tuple[str, PackedAdapter]:
        """Return an adapter, and a hash of its contents. Raises ModelError. Any thread."""

    def set_adapter(self, number: int, packed: PackedAdapter) -> None:
        """Let sequences with this number be computed by the adapter, in place of the one before; between steps."""


@dataclass(eq=False)
class _Adapter:
    """An adapter that requests have named."""

    folder: str
    requests: set[Request] = field(default_factory=set)  # those that have not ended
    number: int = 0  # in the kernels; 0: none yet
    digest: str = ""
    packed: PackedAdapter | None = None  # once it has been read, until it has a number
    error: ModelError | None = None


class Adapters(Feature):
    """Gives requests the numbers of their adapters."""

    def __init__(
        self,
        loader: AdapterLoader,
        most: int,
        folders: Collection[str] | None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep `most` adapters, only of these folders, or of any if they are None.

        `wake` is called on another thread when `take_ready` has something to return.
        """
        self._loader = loader
        self._folders = folders
        self._wake = wake
        self._free = list(range(most, 0, -1))
        self._most = most
        self._adapters: dict[str, _Adapter] = {}  # by folder, the least recently named first
        self._read: queue.SimpleQueue[_Adapter] = queue.SimpleQueue()
        self._placeless: list[_Adapter] = []  # that have been read, and wait for a number
        self._thread = ThreadPoolExecutor(1, "quire-adapters")
        self._num_loads = 0

    @property
    def loaded(self) -> Mapping[str, int]:
        """The folders of the adapters that have numbers, each with its number of open requests."""
        return {each.folder: len(each.requests) for each in self._adapters.values() if each.number}

    def check(self, message: EngineCoreRequest) -> None:
        """Reject adapters that requests may not name."""
        if message.adapter and self._folders is not None and message.adapter not in self._folders:
            raise RejectedError(
                f"adapter={message.adapter!r} is not one of this engine; name one of its lora_modules, or start it "
                "with --allow-runtime-lora"
            )

    def begin(self, request: Request) -> None:
        """Have the adapter read, if that has not been done."""
        folder = request.message.adapter
        if not folder:
            return
        adapter = self._adapters.pop(folder, None)
        if adapter is None:
            adapter = _Adapter(folder)
            self._thread.submit(self._load, adapter)
        self._adapters[folder] = adapter
        adapter.requests.add(request)
        if adapter.number:
            self._give(request, adapter)

    def holds(self, request: Request) -> bool:
        """Return True while the adapter is being read."""
        return bool(request.message.adapter) and not request.adapter

    def take_ready(self) -> Iterator[tuple[Request, RejectedError | None]]:
        """Yield the requests whose adapters are there, or the errors with which they must end."""
        while not self._read.empty():
            self._placeless.append(self._read.get_nowait())
        for adapter in list(self._placeless):
            if adapter.error is not None:
                error = RejectedError(f"adapter={adapter.folder!r} can't be used: {adapter.error}")
                self._drop(adapter)
                yield from ((request, error) for request in list(adapter.requests))
            elif not adapter.requests:
                self._drop(adapter)
            elif self._place(adapter):
                for request in adapter.requests:
                    self._give(request, adapter)
                    yield request, None

    def remove(self, request: Request, reason: FinishReason | None, now: float) -> None:
        """Stop pinning the adapter of a request that ends."""
        if (adapter := self._adapters.get(request.message.adapter)) is not None:
            adapter.requests.discard(request)

    def stats(self) -> dict[str, float]:
        """Return counts of adapters."""
        return {"adapters_loaded": len(self.loaded), "adapter_loads": self._num_loads}

    def stop(self) -> bool:
        """End the thread once it has read what it reads."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        return True

    def _load(self, adapter: _Adapter) -> None:
        """Read an adapter; on the thread."""
        try:
            adapter.digest, adapter.packed = self._loader.read_adapter(Path(adapter.folder))
        except ModelError as error:
            adapter.error = error
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the adapter's fault alone
            adapter.error = ModelError(f"{type(error).__name__}: {error}")
        self._read.put(adapter)
        self._wake()

    def _place(self, adapter: _Adapter) -> bool:
        """Give an adapter that has been read a number, maybe that of one that is not in use; False if all are."""
        if not self._free:
            idle = next((each for each in self._adapters.values() if each.number and not each.requests), None)
            if idle is None:
                return False
            self._free.append(idle.number)
            del self._adapters[idle.folder]
        assert adapter.packed is not None
        adapter.number = self._free.pop()
        self._loader.set_adapter(adapter.number, adapter.packed)
        self._placeless.remove(adapter)
        self._num_loads += 1
        adapter.packed = None
        return True

    def _drop(self, adapter: _Adapter) -> None:
        self._placeless.remove(adapter)
        del self._adapters[adapter.folder]

    def _give(self, request: Request, adapter: _Adapter) -> None:
        request.adapter = adapter.number
        if request.cache_salt is not None:
            request.cache_salt = f"{adapter.digest} {request.cache_salt}"
