"""Ray Serve's router with prefix affinity: a request goes where the answer is likely to end first."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple, cast

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from quire.frontend.ray.cached_prefixes import decode_keys
from quire.frontend.ray.replica import PREFIXES
from quire.protocol.codec import EngineDecoder
from quire.protocol.messages import EngineCoreRequest
from quire.protocol.routing.prefix_outline import PrefixOutline, shared_page_keys
from quire.protocol.routing.routers import PrefixAffinity, RoutedRequest

STATS_SECONDS = 2.0
"""Seconds between two looks of Ray's controller at what each replica has cached."""

_REPORTED_SECONDS = 10.0  # after which the replica has told what it has cached of a request that has ended
_RELAY = "relay"


class _Ended(NamedTuple):
    """The prefixes of a request that has ended, which are still expected of a replica until the `deadline`."""

    deadline: float
    number: int
    keys: list[int]


class PrefixRouter(RequestRouter):
    """The router of one ingress. It knows what the replicas have told of their caches, and its own requests.

    The prefixes of a request count as cached at its replica from when it is sent until the replica must have told.
    """

    def initialize_state(self, block_size: int) -> None:
        """Begin; `block_size`: tokens of a KV page."""
        self._block_size = block_size
        self._outline = PrefixOutline(keys_of=shared_page_keys)
        self._policy = PrefixAffinity(outline=self._outline)
        self._decoder = EngineDecoder()
        self._numbers: dict[ReplicaID, int] = {}  # of replicas, as the policy knows them
        self._told: dict[int, bytes] = {}  # of each replica, what it has told last
        self._next = 0
        self._sent: dict[str, RoutedRequest] = {}  # by Ray's ids
        self._expected: dict[str, list[int]] = {}  # prefixes of requests that a replica has taken, by Ray's ids
        self._ended: deque[_Ended] = deque()

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
        for replica in replicas:
            self._note_told(self._numbers[replica.replica_id], replica.routing_stats.get(PREFIXES, b""))

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
        self._forget_ended()
        request_id = pending_request.metadata.internal_request_id
        self._take_back(request_id)
        request = self._sent[request_id] = self._routed(pending_request)
        number = self._policy.send(request, sorted(known))
        pending_request.future.add_done_callback(
            lambda future: self._take_back(request_id) if future.cancelled() else None
        )
        return [[known.pop(number)], list(known.values())]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count the request where it has been sent, and its prompt as computed, since nobody tells when it is."""
        del result
        request_id = pending_request.metadata.internal_request_id
        request = self._sent.get(request_id)
        number = self._numbers.get(replica_id)
        if request is None or number is None:
            return
        if request.engine != number:
            self._policy.take_back(request)
            self._policy.send(request, [number])
        self._expected[request_id], request.expected = request.expected, []
        self._policy.first_token(request)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count the request no more."""
        del replica_id
        self._take_back(internal_request_id)

    def _routed(self, pending_request: PendingRequest) -> RoutedRequest:
        request = cast("EngineCoreRequest", self._decoder.decode([pending_request.args[0]]))
        tokens = request.prompt_token_ids
        return RoutedRequest(len(tokens), lambda: tokens, request.cache_salt)

    def _take_back(self, request_id: str) -> None:
        if (request := self._sent.pop(request_id, None)) is None:
            return
        if (keys := self._expected.pop(request_id, None)) and request.engine is not None:
            self._ended.append(_Ended(time.monotonic() + _REPORTED_SECONDS, request.engine, keys))
        self._policy.take_back(request)

    def _forget_ended(self) -> None:
        """Expect no more what replicas have told since."""
        now = time.monotonic()
        while self._ended and self._ended[0].deadline <= now:
            _, number, keys = self._ended.popleft()
            self._outline.expect_no_more(number, keys)

    def _note_told(self, number: int, told: bytes) -> None:
        """Take note of what a replica has cached, if that has changed."""
        if told != self._told.get(number, b""):
            self._told[number] = told
            self._outline.replace(number, decode_keys(told))

    def _remove(self, replica_id: ReplicaID) -> None:
        number = self._numbers.pop(replica_id)
        for request in self._sent.values():
            if request.engine == number:
                self._policy.take_back(request)
        self._policy.remove(number)
        self._told.pop(number, None)
