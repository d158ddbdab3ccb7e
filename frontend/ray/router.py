"""Ray Serve's router with prefix affinity: a request goes where the answer is likely to end first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, cast

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from quire.protocol.codec import EngineDecoder
from quire.protocol.messages import EngineCoreRequest, PrefixReport
from quire.protocol.routing.prefix_outline import page_keys
from quire.protocol.routing.routers import PrefixAffinity, RoutedRequest

_PAGES = 4096  # of a replica whose number of KV pages is not known yet
_RELAY = "relay"


class PrefixRouter(RequestRouter):
    """The router of one ingress. It knows what it has sent to which replica, and has that for what is cached there."""

    def initialize_state(self, block_size: int) -> None:
        """Begin; `block_size`: tokens of a KV page."""
        self._block_size = block_size
        self._policy = PrefixAffinity()
        self._decoder = EngineDecoder()
        self._numbers: dict[ReplicaID, int] = {}  # of replicas, as the policy knows them
        self._caches: dict[int, SentPrefixes] = {}
        self._next = 0
        self._sent: dict[str, RoutedRequest] = {}  # by Ray's ids

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take note of the replicas that there are."""
        super().update_replicas(replicas)
        present = {replica.replica_id for replica in replicas}
        for replica_id in self._numbers.keys() - present:
            self._remove(replica_id)
        for replica_id in present - self._numbers.keys():
            number = self._numbers[replica_id] = self._next
            self._next += 1
            self._policy.add(number, self._block_size)
            self._caches[number] = SentPrefixes(self._policy, number)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica."""
        super().on_replica_actor_died(replica_id)
        if replica_id in self._numbers:
            self._remove(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the best replica, and then all others, for the case that it takes no more requests."""
        known = {
            self._numbers[each.replica_id]: each for each in candidate_replicas if each.replica_id in self._numbers
        }
        if not known or pending_request is None or pending_request.metadata.call_method != _RELAY:
            return [candidate_replicas]
        request_id = pending_request.metadata.internal_request_id
        self._take_back(request_id)
        request = self._sent[request_id] = self._routed(pending_request)
        number = self._policy.send(request, sorted(known))
        pending_request.future.add_done_callback(
            lambda future: self._take_back(request_id) if future.cancelled() else None
        )
        return [[known.pop(number)], list(known.values())]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count the request where it has been sent, and have its prompt for cached there from now on."""
        del result
        request = self._sent.get(pending_request.metadata.internal_request_id)
        number = self._numbers.get(replica_id)
        if request is None or number is None:
            return
        if request.engine != number:
            self._policy.take_back(request)
            self._policy.send(request, [number])
        self._policy.first_token(request)
        num_pages = self._replicas[replica_id].routing_stats.get("num_pages", _PAGES)
        self._caches[number].add(request.salt, request.read(), self._block_size, num_pages)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count the request no more."""
        del replica_id
        self._take_back(internal_request_id)

    def _routed(self, pending_request: PendingRequest) -> RoutedRequest:
        request = cast("EngineCoreRequest", self._decoder.decode([pending_request.args[0]]))
        tokens = request.prompt_token_ids
        return RoutedRequest(len(tokens), lambda: tokens, request.cache_salt)

    def _take_back(self, request_id: str) -> None:
        if (request := self._sent.pop(request_id, None)) is not None:
            self._policy.take_back(request)

    def _remove(self, replica_id: ReplicaID) -> None:
        number = self._numbers.pop(replica_id)
        for request in self._sent.values():
            if request.engine == number:
                self._policy.take_back(request)
        self._policy.remove(number)
        del self._caches[number]


class SentPrefixes:
    """The prefixes that were sent to an engine: the last of them, as many pages as it has.

    They are reported to the policy as an engine reports its cache.
    """

    def __init__(self, policy: PrefixAffinity, engine: int) -> None:
        self._policy = policy
        self._engine = engine
        self._pages: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    def add(self, salt: str, tokens: Sequence[int], block_size: int, num_pages: int) -> None:
        """Add the full pages of a prompt; of `num_pages` and more, the least recently used go."""
        keys = list(page_keys(salt, tokens, block_size))[:num_pages]
        if not keys:
            return
        first_new = next((index for index, key in enumerate(keys) if key not in self._pages), len(keys))
        for key in reversed(keys):  # a page goes before those that it follows
            self._pages[key] = None
            self._pages.move_to_end(key)
        removed = [self._pages.popitem(last=False)[0] for _ in range(len(self._pages) - num_pages)]
        root = hash(salt)
        parent = keys[first_new - 1] if first_new else root
        new = tokens[first_new * block_size : len(keys) * block_size]
        stored = [(parent, keys[first_new:], list(new))] if first_new < len(keys) else []
        self._policy.report(self._engine, PrefixReport([(root, salt)], removed, stored))
