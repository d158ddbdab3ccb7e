"""Fetches: prefixes on their way from a tier into the prefix cache, and the requests that wait for them.

A fetch has a sequence of its own, which holds the pages until all have come. They go into the prefix cache as they
come, where the requests that waited find them like any others. So nothing depends on a request while its pages come: it
may end, or lose patience and compute the rest.

Pages of a model with state are of use only up to a state. So the pieces of the state at their end come first, and all
go into the prefix cache together.
"""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from quire.engine_core.kv_tiers.tier import Fetch, Key, KvTier
from quire.engine_core.request import Request, RequestStatus
from quire.engine_core.scheduling.prefill_budget import PrefillBudget
from quire.kernels.runner import Sequences
from quire.protocol.engine_shape import EngineShape

TierChoice = Callable[[str], Sequence[KvTier]]
"""Returns the tiers of a request with this `kv_source`, those nearer to this engine first."""

_MAX_FETCHES = 8  # at a time
_SHARE_OF_PAGES = 4  # one page in four is being fetched at most, unless there is but one fetch
_MAX_FETCHES_OF_REQUEST = 3  # what comes may be evicted before it starts
_PATIENCE = 4  # times the time that computing the pages takes
_LEAST_PATIENCE = 1.0  # seconds
_MOST_PATIENCE = 30.0
_MOST_PATIENCE_WITH_PEER = 300.0  # while another engine is alive and has yet to compute others' prompts


@dataclass(eq=False)
class _Transfer:
    """A fetch from the side of the scheduler."""

    fetch: Fetch
    tier: KvTier
    slot: int  # slot of the transfer's own sequence
    first: int  # index of the first fetched page in the sequence, after any pieces of a state
    patience: float  # seconds without a page after which it is cancelled
    deadline: float
    num_come: int = 0  # pieces of a state, and pages
    num_shared: int = 0  # pages that have come and are in the prefix cache
    requests: dict[Request, int] = field(default_factory=dict)  # waiting requests, each with the `num_shared` it needs
    is_cancelled: bool = False


class Fetches:
    """The open fetches. `wake` is called, on any thread, when `take_ready` has something new to return."""

    def __init__(
        self,
        sequences: Sequences,
        limits: EngineShape,
        tiers: TierChoice,
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
        self._waiting_for_turn: list[Request] = []  # until an open fetch ends
        self._num_fetches = Counter[Request]()  # that requests have waited for
        self._asked: set[Request] = set()  # requests whose prefill another engine has been asked for
        self._done: queue.SimpleQueue[Fetch] = queue.SimpleQueue()
        self.num_tokens = 0  # that have come

    @property
    def is_open(self) -> bool:
        """True while any page is being fetched."""
        return bool(self._open)

    def begin(self, request: Request, num_found: int) -> bool:
        """Begin to fetch what follows the first `num_found` tokens of an open request; return True if it is to wait."""
        tiers = self._tiers(request.message.kv_source)
        if not tiers or request.needs_every_token:
            return False
        keys = self._sequences.keys(request.slot)[1:]
        for each in tiers:
            each.touch(keys)
        start = num_found // self._limits.block_size
        if start and (state_keys := self._sequences.state_keys(keys[start - 1])):
            for each in tiers:
                each.touch(state_keys)
        missing = keys[start:]
        if not missing or self._num_fetches[request] >= _MAX_FETCHES_OF_REQUEST:
            return False
        transfer = self._by_key.get(missing[0])
        if transfer is None:
            if (found := self._find(request, tiers, num_found, missing)) is None:
                return False
            tier, count = found
            if self._is_full(count):
                self._waiting_for_turn.append(request)
                return True
            transfer = self._start(request, tier, num_found, missing[:count])
        if transfer is None or transfer.is_cancelled:
            return False
        return self._join(request, transfer, num_found, missing)

    def take_ready(self) -> Iterator[Request]:
        """Hand over what has come, and yield the requests that need not wait any longer."""
        now = self._clock()
        while not self._done.empty():
            transfer = self._open.pop(self._done.get_nowait())
            for key in transfer.fetch.keys:
                self._by_key.pop(key, None)
            (self._share_filled if transfer.fetch.num_states else self._share)(transfer)
            self._sequences.close(transfer.slot)
            yield from _waiting([*transfer.requests, *self._waiting_for_turn])
            self._waiting_for_turn.clear()
        for transfer in self._open.values():
            if len(transfer.fetch.contents) > transfer.num_come:
                transfer.num_come = len(transfer.fetch.contents)
                transfer.deadline = now + transfer.patience
                if not transfer.fetch.num_states:
                    self._share(transfer)
                    yield from _waiting(self._served(transfer))
            elif now > transfer.deadline and not transfer.is_cancelled:
                yield from _waiting(transfer.requests)
                transfer.requests.clear()
                transfer.is_cancelled = True
                transfer.tier.cancel(transfer.fetch)

    def forget(self, request: Request) -> None:
        """Forget a request that ends; the fetches that it waits for go on."""
        self._num_fetches.pop(request, None)
        self._asked.discard(request)

    def _is_expected(self, request: Request) -> bool:
        """Return True if another engine is computing the prompt, and has not been asked for it yet."""
        return request.message.remote_prefill and request not in self._asked

    def _find(
        self, request: Request, tiers: Sequence[KvTier], num_found: int, keys: Sequence[Key]
    ) -> tuple[KvTier, int] | None:
        """Return the tier to fetch from and how many pages, if that takes less time than computing them.

        Tiers nearer to this engine go first. What another engine is computing for this request is fetched in any case.
        """
        found = [(tier, count) for tier in tiers if (count := self._find_in(tier, keys))]
        if not found:
            return None
        if self._is_expected(request):
            return found[-1]
        tier, count = found[0]
        num_pages = count + len(self._sequences.state_keys(keys[0]))
        seconds = self._budget.seconds(num_found, num_found + count * self._limits.block_size)
        return (tier, count) if tier.seconds(num_pages) < seconds else None

    def _find_in(self, tier: KvTier, keys: Sequence[Key]) -> int:
        """Return how many of the first of these pages a tier has; of a model with state, up to the last state."""
        count = tier.find(keys)
        if self._sequences.states is None:
            return count
        for end in range(count, 0, -1):
            if tier.find(self._sequences.state_keys(keys[end - 1], 1)):
                pieces = self._sequences.state_keys(keys[end - 1])
                if tier.find(pieces) == len(pieces):
                    return end
        return 0

    def _start(self, request: Request, tier: KvTier, num_found: int, keys: Sequence[Key]) -> _Transfer | None:
        """Start a fetch of these pages, if there is room for them."""
        size = self._limits.block_size
        end = num_found + len(keys) * size
        tokens = self._sequences.tokens(request.slot)[: end + 1]  # one token more, as a match leaves one to compute
        slot = self._sequences.open(tokens, len(tokens), cache_salt=request.cache_salt)
        if self._sequences.start(slot, end) is None:
            self._sequences.close(slot)
            return None
        first, salt = num_found // size, request.cache_salt or ""
        state_keys, state_pages = self._sequences.state_keys(keys[-1]), self._sequences.state_pages(slot)
        pages = [*state_pages, *self._sequences.pages(slot)[first:]]
        is_expected = self._is_expected(request)
        fetch = Fetch([*state_keys, *keys], pages, self._note_done, tokens, salt, is_expected, len(state_keys))
        most = _MOST_PATIENCE_WITH_PEER if is_expected else _MOST_PATIENCE
        patience = min(max(_LEAST_PATIENCE, _PATIENCE * self._budget.seconds(num_found, end)), most)
        if is_expected and state_keys:
            patience = most  # nothing comes before the whole prompt is computed
        self._asked.add(request)  # once: what has not come by the end of the fetch will not come
        transfer = _Transfer(fetch, tier, slot, first, patience, self._clock() + patience)
        self._open[fetch] = transfer
        self._by_key.update(dict.fromkeys(keys, transfer))
        tier.fetch(fetch)
        return transfer

    def _is_full(self, num_pages: int) -> bool:
        """Return True if so many pages more would be too many."""
        num_open = sum(len(fetch.keys) - fetch.num_states for fetch in self._open)
        most = self._limits.num_pages // _SHARE_OF_PAGES
        return len(self._open) >= _MAX_FETCHES or (num_open > 0 and num_open + num_pages > most)

    def _note_done(self, fetch: Fetch) -> None:
        self._done.put(fetch)
        self._wake()

    def _join(self, request: Request, transfer: _Transfer, num_found: int, missing: Sequence[Key]) -> bool:
        """Let a request wait for a transfer that brings its next page, unless it is sooner done by itself."""
        count = next((i for i, key in enumerate(missing) if self._by_key.get(key) is not transfer), len(missing))
        num_pages = transfer.fetch.keys.index(missing[0]) - transfer.fetch.num_states + count
        if transfer.fetch.num_states and num_pages < len(transfer.fetch.keys) - transfer.fetch.num_states:
            return False  # the state is that after another prompt
        seconds = self._budget.seconds(num_found, num_found + count * self._limits.block_size)
        if not transfer.fetch.is_expected and transfer.tier.seconds(0) >= seconds:
            return False
        self._num_fetches[request] += 1
        transfer.requests[request] = num_pages
        return True

    def _served(self, transfer: _Transfer) -> list[Request]:
        """Remove and return the requests for which enough has come."""
        served = [each for each, count in transfer.requests.items() if count <= transfer.num_shared]
        for request in served:
            del transfer.requests[request]
        return served

    def _share(self, transfer: _Transfer) -> None:
        """Put the pages that have come into the prefix cache."""
        new, size = transfer.fetch.contents[transfer.num_shared :], self._limits.block_size
        transfer.num_shared += len(new)
        self.num_tokens += len(new) * size
        if new:
            self._sequences.share(transfer.slot, (transfer.first + transfer.num_shared) * size, new)

    def _share_filled(self, transfer: _Transfer) -> None:
        """Put what has come of a model with state into the prefix cache, if it is all that there is."""
        fetch, size = transfer.fetch, self._limits.block_size
        new = fetch.contents[fetch.num_states :]
        if not new or not (fetch.is_whole or len(fetch.contents) == len(fetch.keys)):
            return
        transfer.num_shared = len(new)
        self.num_tokens += len(new) * size
        self._sequences.share_filled(transfer.slot, (transfer.first + len(new)) * size, new)


def _waiting(requests: Iterable[Request]) -> Iterator[Request]:
    """Yield the requests that have not ended meanwhile."""
    return (each for each in requests if each.status is RequestStatus.WAITING_FOR_REMOTE_KVS)
