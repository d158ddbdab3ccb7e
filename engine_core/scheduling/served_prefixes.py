"""Served prefixes: what other engines fetch from the prefix cache of this one.

Each has a slot of its own, which never runs. It holds the pages that the cache has of the prefix, and takes more as a
request computes them: so a prompt is on its way before it is done. Of a model with state it sends the state at the end
first, so that nothing is on its way before there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quire.engine_core.feature import Feature
from quire.engine_core.kv_tiers.page_server import Delivery, PageSender
from quire.engine_core.request import Request, RequestStatus
from quire.engine_core.validation import check_prefix
from quire.kernels.runner import Sequences
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import ClientMessage, KvFetch, KvFetched, KvMessage

_GRACE_SECONDS = 1.0  # in which the request that is to compute an expected prefix may arrive
_MOST_PREFIXES = 64


@dataclass(eq=False)
class _Served:
    message: KvFetch
    server: PageSender
    slot: int
    deadline: float  # time until which a request that computes it may arrive
    delivery: Delivery
    num_pages: int = 0  # number of pages that the slot holds
    request: Request | None = None  # request that computes the prefix


class ServedPrefixes(Feature):
    """The open fetches of other engines. Without a `server` nothing can be fetched."""

    def __init__(
        self,
        sequences: Sequences,
        limits: EngineShape,
        send: Callable[[bytes, KvFetched], None],
        server: PageSender | None,
        clock: Callable[[], float],
    ) -> None:
        """`send` takes the errors of fetches that can't be served."""
        self._sequences = sequences
        self._limits = limits
        self._send = send
        self._requests: Iterable[Request] = ()
        self._server = server
        self._clock = clock
        self._open: list[_Served] = []

    def attach(self, requests: Iterable[Request]) -> None:
        """See Feature."""
        self._requests = requests

    def receive(self, client_id: bytes, message: ClientMessage) -> bool:
        """Take a KvFetch: begin to serve it, or answer with an error."""
        if not isinstance(message, KvFetch):
            return False
        try:
            check_prefix(message.token_ids, message.cache_salt, self._limits)
            self._begin(client_id, message)
        except ValueError as error:
            self._send(client_id, KvFetched(message.fetch_id, str(error)))
        return True

    def receive_kv(self, client_id: bytes, message: KvMessage) -> None:
        """See Feature."""
        if self._server is not None:
            self._server.receive(client_id, message)

    def _begin(self, client_id: bytes, message: KvFetch) -> None:
        """Begin to serve a fetch. Raises ValueError for one that can't be served."""
        if self._server is None:
            raise ValueError("this engine keeps no prefixes that could be fetched")
        if len(self._open) == _MOST_PREFIXES:
            raise ValueError(f"{_MOST_PREFIXES} prefixes are being fetched; try again later")
        if message.first < 0 or message.count < 1:
            raise ValueError(f"there are no {message.count} pages from {message.first} on; ask for at least page 0")
        slot = self._sequences.open(message.token_ids, len(message.token_ids), cache_salt=message.cache_salt)
        try:
            delivery = self._server.open(client_id, message.fetch_id)
        except ValueError:
            self._sequences.close(slot)
            raise
        self._open.append(_Served(message, self._server, slot, self._clock() + _GRACE_SECONDS, delivery))

    def stats(self) -> dict[str, float]:
        """Return counters by name."""
        return {} if self._server is None else self._server.stats()

    def update(self) -> None:
        """Hand over what has been computed since the last call, and close what has been sent."""
        for served in list(self._open):
            if served.delivery.is_ended:
                self._close(served)
            elif served.server.is_stuck(served.delivery):
                self._cut([served])
            elif not served.delivery.is_complete:
                self._extend(served)

    def forget(self, client_id: bytes) -> None:
        """End the fetches of a client that has left."""
        self._cut([served for served in self._open if served.delivery.client_id == client_id])

    def free_idle_pages(self) -> bool:
        """End all fetches, since their pages are needed; return True if there were any."""
        return self._cut(list(self._open))

    def stop(self) -> bool:
        """See Feature."""
        return self._server is None or self._server.stop()

    def _extend(self, served: _Served) -> None:
        will_grow = self._will_grow(served)  # asked first: a request that ends has computed all by then
        message = served.message
        end = message.first + message.count
        num_pages = min(self._sequences.hold_match(served.slot) // self._limits.block_size, end)
        is_complete = num_pages == end or not will_grow
        first = max(served.num_pages, message.first)
        if num_pages > first and (is_complete or self._sequences.states is None):
            pages = self._sequences.pages(served.slot)[first:num_pages]
            served.server.extend(served.delivery, [*self._sequences.state_pages(served.slot), *pages])
            served.num_pages = num_pages
        if is_complete:
            served.server.complete(served.delivery)

    def _will_grow(self, served: _Served) -> bool:
        """Return True if a request computes the prefix, or one may come that does."""
        if not served.message.is_expected:
            return False
        if served.request is None:
            found = (each for each in self._requests if _computes(each, served.message))
            served.request = max(found, key=_progress, default=None)
        if served.request is None:
            return self._clock() < served.deadline
        return not served.request.is_finished

    def _cut(self, several: list[_Served]) -> bool:
        for served in several:
            served.server.cut(served.delivery)
            self._close(served)
        return bool(several)

    def _close(self, served: _Served) -> None:
        self._sequences.close(served.slot)
        self._open.remove(served)


def _progress(request: Request) -> tuple[bool, int]:
    return request.status is RequestStatus.RUNNING, request.num_prompt_tokens


def _computes(request: Request, message: KvFetch) -> bool:
    """Return True if the request's prompt is the prefix of the message, as far as both go."""
    prompt, tokens = request.prompt_token_ids, message.token_ids
    last = min(len(prompt), len(tokens)) - 1
    return (
        request.cache_salt == message.cache_salt
        and prompt[last] == tokens[last]  # nearly always decides
        and prompt[: last + 1] == tokens[: last + 1]
    )
