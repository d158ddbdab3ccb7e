"""LoRA adapters of requests: read while steps go on, kept while there is room, pinned while in use.

An adapter has a number, which the rows of its requests carry to the kernels. Pages of the prefix cache belong to what
its files contain: two folders with the same contents share them. A path whose files have changed since they were read
is another adapter from the next request on; requests of the one before go on with it.

At most one adapter is in memory beside those that have numbers: the next one, which is being read or waits for a
number. Of all others there are only the requests that wait, and these take turns by tenant.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from quire.engine_core.adapter_files import FileLooks, Files
from quire.engine_core.adapter_reader import AdapterContents, AdapterLoader, AdapterReader, ShortMemory
from quire.engine_core.adapter_turns import AdapterTurns
from quire.engine_core.feature import Feature
from quire.engine_core.request import Request, RequestStatus
from quire.engine_core.validation import RejectedError, adapter_path
from quire.protocol.messages import EngineCoreRequest, FinishReason

_PATIENCE = 1.0  # seconds that an adapter waits before new requests of one that has a number have to wait too


def adapter_salt(digest: str, cache_salt: str) -> str:
    """Return the salt of a request's KV pages, from a hash of its adapter's contents and from its own salt.

    It begins with a NUL, which no client may give (`check_service`), and its length does not grow with theirs.
    """
    return "\0" + hashlib.sha256(f"{digest}\0{cache_salt}".encode()).hexdigest()


@dataclass(eq=False)
class _Adapter:
    """An adapter that requests have named."""

    path: str
    since: float  # when it began to wait for a number
    waiting: dict[Request, None] = field(default_factory=dict)  # requests that may not start yet
    late: dict[Request, None] = field(default_factory=dict)  # those that have come since it began to be read
    users: set[Request] = field(default_factory=set)  # requests that have its number, and have not ended
    number: int = 0  # in the kernels; 0: none
    digest: str = ""  # once it has been read
    files: Files = frozenset()  # as they were then
    contents: AdapterContents | None = None  # from when it has been read until it gets a number
    is_outdated: bool = False  # its files have changed: new requests are not its own

    @property
    def is_idle(self) -> bool:
        """True if no request needs it."""
        return not self.users and not self.waiting


class Adapters(Feature):
    """Gives requests the numbers of their adapters."""

    takes_adapters = True

    def __init__(
        self,
        loader: AdapterLoader,
        max_loras: int,
        folders: Collection[str] | None,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        note: Callable[[Request], None] | None = None,
    ) -> None:
        """Keep `max_loras` adapters, only of these folders, or of any if they are None.

        `wake` is called on any thread when `take_ready` has something to return, and `note` with each request that has
        got its adapter, and with it the salt of its prefixes.
        """
        self._loader = loader
        self._folders = None if folders is None else frozenset(map(adapter_path, folders))
        self._wake = wake
        self._clock = clock
        self._note = note
        self._reader = AdapterReader(loader, wake, clock)
        self._free_numbers = list(range(max_loras, 0, -1))
        self._looks = FileLooks(wake, clock)
        self._adapters: dict[str, _Adapter] = {}  # by path, but for outdated ones: they have numbers, or requests wait
        self._loaded: dict[int, _Adapter] = {}  # by number, the least recently named first
        self._requests: dict[tuple[bytes, str], Request] = {}  # open ones that name adapters
        self._own: dict[Request, _Adapter] = {}  # the adapters of these
        self._turns = AdapterTurns()  # requests of adapters that have no number, but for the next one
        self._next: _Adapter | None = None  # it is being read, or waits for a number
        self._victim: _Adapter | None = None  # it is to lose its number to the next: its new requests have to wait
        self._num_loads = 0

    @property
    def loaded(self) -> Mapping[str, int]:
        """The paths of the adapters that have numbers, each with its number of requests that may run."""
        found = dict.fromkeys((each.path for each in self._loaded.values()), 0)
        for each in self._loaded.values():
            found[each.path] += len(each.users)
        return found

    def check(self, message: EngineCoreRequest) -> None:
        """Reject adapters that requests may not name."""
        if message.adapter and self._folders is not None and adapter_path(message.adapter) not in self._folders:
            raise RejectedError(
                f"adapter={message.adapter!r} is not one of this engine; name one of its lora_modules, or start it "
                "with --allow-runtime-lora"
            )

    def begin(self, request: Request) -> None:
        """Let a request wait for its adapter, or, if it is to share a prompt, for that of the other request."""
        message = request.message
        if not (path := adapter_path(message.adapter)):
            return
        other = None
        if message.shares_prompt_with is not None:
            other = self._requests.get((request.client_id, message.shares_prompt_with))
        self._requests[request.client_id, message.request_id] = request
        if other is None or self._own[other].path != path:
            self._enter(request, path)
        else:
            self._follow(request, other)
        self._read_next()

    def _enter(self, request: Request, path: str) -> None:
        """Let a request wait until its adapter has been read, or its files are known to be what has been read."""
        adapter = self._own[request] = self._adapters.setdefault(path, _Adapter(path, self._clock()))
        if adapter.number:
            self._loaded[adapter.number] = self._loaded.pop(adapter.number)
            self._looks.ask(path, request)
        elif adapter is self._next:
            adapter.late[request] = None
        else:
            adapter.waiting[request] = None
            self._turns.add(request)

    def _follow(self, request: Request, other: Request) -> None:
        """Let a request have the same adapter as another one, whatever has become of the files meanwhile."""
        adapter = self._own[request] = self._own[other]
        if self._looks.join(request, other):
            return
        (adapter.late if other in adapter.late else adapter.waiting)[request] = None
        if not adapter.number and adapter is not self._next:
            self._turns.add(request)

    def held_status(self, request: Request) -> RequestStatus | None:
        """Return WAITING_FOR_ADAPTER while the request has no number."""
        return RequestStatus.WAITING_FOR_ADAPTER if request.message.adapter and not request.adapter else None

    def take_ready(self) -> Iterator[tuple[Request, RejectedError | None]]:
        """Yield the requests whose adapters have got numbers, or the errors with which they must end."""
        self._take_looks()
        yield from self._take_read()
        self._load_next()
        self._drop_outdated()
        self._read_next()
        for adapter in [each for each in self._loaded.values() if each.waiting and each is not self._victim]:
            for request in list(adapter.waiting):
                self._assign(request, adapter)
                yield request, None

    def remove(self, request: Request, reason: FinishReason | None, now: float) -> None:
        """Forget a request that ends."""
        if (adapter := self._own.pop(request, None)) is None:
            return
        del self._requests[request.client_id, request.message.request_id]
        self._turns.remove(request)
        adapter.waiting.pop(request, None)
        adapter.late.pop(request, None)
        adapter.users.discard(request)
        if not adapter.number and not adapter.waiting and adapter is not self._next:
            self._forget(adapter)
        elif (self._next is not None or adapter.is_outdated) and not adapter.users:
            self._wake()  # there may be nothing else to step for

    def stats(self) -> dict[str, float]:
        """Return counts of adapters."""
        return {"adapters_loaded": len(self._loaded), "adapter_loads": self._num_loads}

    def evict(self) -> None:
        """See Feature."""
        while self._evict_least_recent():
            pass

    def stop(self) -> bool:
        """Return False if an adapter is being read, which can't be ended."""
        are_stopped = self._reader.stop(), self._looks.stop()
        return all(are_stopped)

    def _take_looks(self) -> None:
        """Let the requests whose adapters' files have been looked at start, or wait for what these contain now."""
        for path, asking, files in self._looks.take():
            requests = [request for request in asking if request in self._own]
            adapter = self._adapters.get(path)
            if adapter is not None and adapter.number and files and files != adapter.files:
                adapter.is_outdated = True
                del self._adapters[path]
                adapter = None
            for request in requests:
                if adapter is None or not adapter.number:
                    self._enter(request, path)
                else:
                    self._own[request] = adapter
                    adapter.waiting[request] = None

    def _read_next(self) -> None:
        """Begin to read the adapter of the request whose turn it is, unless there is a next one already."""
        if self._next is not None or (request := self._turns.take()) is None:
            return
        self._next = adapter = self._adapters[adapter_path(request.message.adapter)]
        for other in adapter.waiting:
            self._turns.remove(other)
        self._reader.start(adapter.path)

    def _take_read(self) -> Iterator[tuple[Request, RejectedError]]:
        """Take the next adapter from the reader, or yield its requests with the error that has come instead."""
        adapter, result = self._next, self._reader.take()
        if adapter is None or result is None:
            return
        if isinstance(result, ShortMemory):
            if self._evict_least_recent():
                self._reader.start(adapter.path)
                return
            result = result.error
        if isinstance(result, AdapterContents):
            adapter.contents, adapter.digest, adapter.files = result, result.digest, result.files
            return
        self._drop_next()
        for request in list(adapter.waiting):
            yield request, RejectedError(f"adapter={adapter.path!r} can't be used: {result}")
        self._enter_late(adapter)

    def _enter_late(self, adapter: _Adapter) -> None:
        """Let requests that have come while an adapter was being read begin again: its files may have changed since."""
        late, adapter.late = adapter.late, {}
        for request in late:
            self._enter(request, adapter.path)

    def _drop_next(self) -> None:
        """Let the next adapter be none: it can't be used, or no request waits for it."""
        assert self._next is not None
        self._forget(self._next)
        self._next = self._victim = None

    def _forget(self, adapter: _Adapter) -> None:
        """Have the next request of its path begin with another adapter."""
        if self._adapters.get(adapter.path) is adapter:
            del self._adapters[adapter.path]

    def _load_next(self) -> None:
        """Give the next adapter a number, maybe that of one that is not in use, once it has been read."""
        adapter = self._next
        if adapter is None or adapter.contents is None:
            return
        if not adapter.waiting and not adapter.late:
            self._drop_next()
            return
        if not self._free_numbers and not self._evict_idle():
            if self._victim is None and self._clock() - adapter.since > _PATIENCE:
                self._victim = min(self._loaded.values(), key=lambda each: len(each.users))
            return
        adapter.number = self._free_numbers.pop()
        self._loader.set_adapter(adapter.number, adapter.contents.packed)
        adapter.contents = None
        self._loaded[adapter.number] = adapter
        self._num_loads += 1
        self._next = self._victim = None
        if adapter.late:
            self._enter_late(adapter)
            self._wake()

    def _evict_idle(self) -> bool:
        """Take its number from an adapter without users, rather one that no request waits for; False if all have some.

        One that requests wait for is read again when it is their turn.
        """
        idle = [each for each in self._loaded.values() if not each.users]
        if not idle:
            return False
        self._evict(min(idle, key=lambda each: bool(each.waiting)))
        return True

    def _evict(self, adapter: _Adapter) -> None:
        """Take its number from an adapter without users."""
        del self._loaded[adapter.number]
        self._free_numbers.append(adapter.number)
        adapter.number = 0
        waiting, adapter.waiting = adapter.waiting, {}
        self._forget(adapter)
        for request in waiting:
            self._enter(request, adapter.path)

    def _drop_outdated(self) -> None:
        """Give back the memory of adapters that no request can name any more."""
        for adapter in [each for each in self._loaded.values() if each.is_outdated and each.is_idle]:
            self._evict(adapter)
            self._loader.set_adapter(self._free_numbers[-1], None)

    def _evict_least_recent(self) -> bool:
        """Give back the memory of one adapter without users, as `_evict_idle` does its number."""
        if not self._evict_idle():
            return False
        self._loader.set_adapter(self._free_numbers[-1], None)
        return True

    def _assign(self, request: Request, adapter: _Adapter) -> None:
        """Let a request run with its adapter."""
        adapter.waiting.pop(request, None)
        adapter.users.add(request)
        request.adapter = adapter.number
        if request.cache_salt is not None:
            request.cache_salt = adapter_salt(adapter.digest, request.cache_salt)
        if self._note is not None:
            self._note(request)
