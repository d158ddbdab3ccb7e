"""Fetches: prefixes on their way from a tier into the prefix cache, and the requests that wait for them.

A fetch has a sequence of its own, which holds the pages until all have come. Then they are in the prefix cache, where
the requests that waited find them like any others. So nothing depends on a request while its pages come: it may end,
or lose patience and compute them.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from quire.engine_core.kv_tiers.tier import Fetch, Key, KvTier
from quire.engine_core.request import Request, RequestStatus
from quire.engine_core.scheduling.prefill_budget import PrefillBudget
from quire.kernels.runner import Sequences
from quire.protocol.engine_shape import EngineShape

_MAX_FETCHES = 8  # at a time
_SHARE_OF_PAGES = 4  # one page in four is being fetched at most, unless there is but one fetch
_MAX_FETCHES_OF_REQUEST = 3  # what comes may be evicted before it starts
_PATIENCE = 4  # times the time that computing the pages takes
_LEAST_PATIENCE = 1.0  # seconds
_MOST_PATIENCE = 30.0


@dataclass(eq=False)
class _Transfer:
    """A fetch from the side of the scheduler."""

    fetch: Fetch
    slot: int  # of its sequence
    num_tokens: int  # that this has, once all pages have come
    deadline: float
    requests: list[Request] = field(default_factory=list)  # that wait for it


class Fetches:
    """The open fetches. `wake` is called, on any thread, when `take_ready` has something new to return."""

    def __init__(
        self,
        sequences: Sequences,
        limits: EngineShape,
        tiers: Sequence[KvTier],
        budget: PrefillBudget,
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._sequences = sequences
        self._limits = limits
        self._tiers = tiers
        self._budget = budget
        self._wake = wake
        self._clock = clock
        self._open: dict[Fetch, _Transfer] = {}
        self._by_key: dict[Key, _Transfer] = {}
        self._done: queue.SimpleQueue[Fetch] = queue.SimpleQueue()
        self.num_tokens = 0  # that have come

    def begin(self, request: Request, num_found: int) -> bool:
        """Begin to fetch what follows the first `num_found` tokens of an open request; return True if it is to wait."""
        if not self._tiers or request.needs_every_token:
            return False
        keys = self._sequences.keys(request.slot)[1:]
        for tier in self._tiers:
            tier.touch(keys)
        missing = keys[num_found // self._limits.block_size :]
        if not missing or request.num_fetches >= _MAX_FETCHES_OF_REQUEST:
            return False
        transfer = self._by_key.get(missing[0]) or self._start(request, num_found, missing)
        if transfer is None or self._clock() > transfer.deadline:
            return False
        request.num_fetches += 1
        transfer.requests.append(request)
        return True

    def take_ready(self) -> Iterator[Request]:
        """Hand over what has come, and yield the requests that need not wait any longer."""
        while not self._done.empty():
            transfer = self._open.pop(self._done.get_nowait())
            for key in transfer.fetch.keys:
                self._by_key.pop(key, None)
            yield from self._finish(transfer)
        for transfer in self._open.values():
            if self._clock() > transfer.deadline:
                yield from _waiting(transfer)
                transfer.requests.clear()

    def _start(self, request: Request, num_found: int, keys: Sequence[Key]) -> _Transfer | None:
        """Start a fetch, if that takes less time than computing."""
        tier = max(self._tiers, key=lambda tier: tier.find(keys))
        count, size = tier.find(keys), self._limits.block_size
        end = num_found + count * size
        seconds = self._budget.seconds(num_found, end)
        if count == 0 or self._is_full(count) or tier.seconds(count) >= seconds:
            return None
        tokens = self._sequences.tokens(request.slot)[: end + 1]  # one token more, as a match leaves one to compute
        slot = self._sequences.open(tokens, len(tokens), cache_salt=request.cache_salt)
        if self._sequences.start(slot, end) is None:
            self._sequences.close(slot)
            return None
        pages = self._sequences.pages(slot)[num_found // size :]
        fetch = Fetch(keys[:count], pages, self._note_done)
        patience = min(max(_LEAST_PATIENCE, _PATIENCE * seconds), _MOST_PATIENCE)
        transfer = self._open[fetch] = _Transfer(fetch, slot, end, self._clock() + patience)
        self._by_key.update(dict.fromkeys(fetch.keys, transfer))
        tier.fetch(fetch)
        return transfer

    def _is_full(self, num_pages: int) -> bool:
        """Return True if so many pages more would be too many."""
        num_open = sum(len(fetch.keys) for fetch in self._open)
        most = self._limits.num_pages // _SHARE_OF_PAGES
        return len(self._open) >= _MAX_FETCHES or (num_open > 0 and num_open + num_pages > most)

    def _note_done(self, fetch: Fetch) -> None:
        self._done.put(fetch)
        self._wake()

    def _finish(self, transfer: _Transfer) -> Iterator[Request]:
        contents, size = transfer.fetch.contents, self._limits.block_size
        num_missing = len(transfer.fetch.keys) - len(contents)
        self._sequences.share(transfer.slot, transfer.num_tokens - num_missing * size, contents)
        self._sequences.close(transfer.slot)
        self.num_tokens += len(contents) * size
        return _waiting(transfer)


def _waiting(transfer: _Transfer) -> Iterator[Request]:
    """Yield the requests that have not ended meanwhile."""
    return (each for each in transfer.requests if each.status is RequestStatus.WAITING_FOR_REMOTE_KVS)
