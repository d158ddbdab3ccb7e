"""LoRA adapters of requests: read on a thread while steps go on, kept while there is room, pinned while in use.

An adapter has a number, which the rows of its requests carry to the kernels. Pages of the prefix cache belong to what
its files contain: two folders with the same contents share them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
import time
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


def adapter_salt(digest: str, cache_salt: str) -> str:
    """Return the salt of a request's KV pages, from a hash of its adapter's contents and from its own salt.

    It begins with a NUL, which no client may give (`check_service`), and its length does not grow with theirs.
    """
    return "\0" + hashlib.sha256(f"{digest}\0{cache_salt}".encode()).hexdigest()


class AdapterLoader(Protocol):
    """Reads adapters, and lets the kernels have them."""

    def read_adapter(self, path: Path) -> tuple[str, PackedAdapter]:
        """Return an adapter, and a hash of its contents. Raises ModelError. Any thread."""

    def set_adapter(self, number: int, packed: PackedAdapter) -> None:
        """Let sequences with this number be computed by the adapter, in place of the one before; between steps."""


_NICE = 5  # a stream on all cores leaves it a quarter of one then
_PATIENCE = 1.0  # seconds that an adapter waits for a number before requests of others have to wait behind it


@dataclass(eq=False)
class _Adapter:
    """An adapter that requests have named."""

    folder: str
    waiting: dict[Request, None] = field(default_factory=dict)  # requests that may not start yet
    users: set[Request] = field(default_factory=set)  # requests that have its number, and have not ended
    number: int = 0  # in the kernels; 0: none
    digest: str = ""
    packed: PackedAdapter | None = None  # once it has been read
    error: ModelError | None = None
    since: float = 0.0  # when it began to wait for a number


def _give_way() -> None:
    """Leave the cores to the threads that compute."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # of this thread alone, on Linux


class Adapters(Feature):
    """Gives requests the numbers of their adapters."""

    takes_adapters = True

    def __init__(
        self,
        loader: AdapterLoader,
        most: int,
        folders: Collection[str] | None,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep `most` adapters, only of these folders, or of any if they are None.

        `wake` is called on another thread when `take_ready` has something to return.
        """
        self._loader = loader
        self._folders = folders
        self._wake = wake
        self._clock = clock
        self._free = list(range(most, 0, -1))
        self._adapters: dict[str, _Adapter] = {}  # by folder, the least recently named first
        self._read: queue.SimpleQueue[_Adapter] = queue.SimpleQueue()
        self._placeless: list[_Adapter] = []  # that have been read, and wait for a number
        self._thread = ThreadPoolExecutor(1, "quire-adapters", _give_way)
        self._num_loads = 0

    @property
    def loaded(self) -> Mapping[str, int]:
        """The folders of the adapters that have numbers, each with its number of requests that may run."""
        return {each.folder: len(each.users) for each in self._adapters.values() if each.number}

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
        if adapter.number and not self._is_held_up:
            self._give(request, adapter)
        else:
            adapter.waiting[request] = None

    def held_status(self, request: Request) -> RequestStatus | None:
        """Return WAITING_FOR_ADAPTER while the request has no number."""
        return RequestStatus.WAITING_FOR_ADAPTER if request.message.adapter and not request.adapter else None

    def take_ready(self) -> Iterator[tuple[Request, RejectedError | None]]:
        """Yield the requests whose adapters are there, or the errors with which they must end."""
        while not self._read.empty():
            self._wait(self._read.get_nowait())
        for adapter in list(self._placeless):
            if adapter.error is not None or not adapter.waiting:
                self._placeless.remove(adapter)
                del self._adapters[adapter.folder]
                error = RejectedError(f"adapter={adapter.folder!r} can't be used: {adapter.error}")
                yield from ((request, error) for request in list(adapter.waiting))
            elif not self._place(adapter):
                break
        if not self._is_held_up:
            for adapter in [each for each in self._adapters.values() if each.number and each.waiting]:
                for request in list(adapter.waiting):
                    self._give(request, adapter)
                    yield request, None

    def remove(self, request: Request, reason: FinishReason | None, now: float) -> None:
        """Forget a request that ends."""
        if (adapter := self._adapters.get(request.message.adapter)) is not None:
            adapter.waiting.pop(request, None)
            adapter.users.discard(request)
            if self._placeless and not adapter.users:
                self._wake()  # there may be nothing else to step for

    def stats(self) -> dict[str, float]:
        """Return counts of adapters."""
        return {"adapters_loaded": len(self.loaded), "adapter_loads": self._num_loads}

    def stop(self) -> bool:
        """End the thread once it has read what it reads."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        return True

    @property
    def _is_held_up(self) -> bool:
        """True if an adapter has waited too long for a number: requests of others must not keep all of them in use."""
        return bool(self._placeless) and self._clock() - self._placeless[0].since > _PATIENCE

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

    def _wait(self, adapter: _Adapter) -> None:
        """Let an adapter wait for a number."""
        adapter.since = self._clock()
        self._placeless.append(adapter)

    def _place(self, adapter: _Adapter) -> bool:
        """Give an adapter that has been read a number, maybe that of one that is not in use; False if all are."""
        if not self._free:
            idle = [each for each in self._adapters.values() if each.number and not each.users]
            if not idle:
                return False
            self._leave(min(idle, key=lambda each: bool(each.waiting)))
        assert adapter.packed is not None
        self._placeless.remove(adapter)
        adapter.number = self._free.pop()
        self._loader.set_adapter(adapter.number, adapter.packed)
        self._num_loads += 1
        return True

    def _leave(self, adapter: _Adapter) -> None:
        """Take an adapter's number from it."""
        self._free.append(adapter.number)
        adapter.number = 0
        if adapter.waiting:
            self._wait(adapter)
        else:
            del self._adapters[adapter.folder]

    def _give(self, request: Request, adapter: _Adapter) -> None:
        """Let a request run with its adapter."""
        adapter.waiting.pop(request, None)
        adapter.users.add(request)
        request.adapter = adapter.number
        if request.cache_salt is not None:
            request.cache_salt = adapter_salt(adapter.digest, request.cache_salt)
