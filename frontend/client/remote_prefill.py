"""Remote prefill: other engines compute long prompts, and the engine that answers fetches their KV from them."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from quire.frontend.client.engine_client import Delivery, EngineAway, EngineBack, EngineLeft
from quire.frontend.client.engine_set import EngineSet
from quire.frontend.client.missing_adapters import missing_adapters
from quire.frontend.client.routing import Routing, Session, salt_of
from quire.frontend.errors import EngineConnectionError, EngineDeadError
from quire.protocol.errors import ProtocolError
from quire.protocol.keys import Security
from quire.protocol.messages import (
    MAX_ABORTED,
    Abort,
    ClientMessage,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Ready,
    Role,
    SamplingParams,
)
from quire.protocol.routing.routers import PrefixAffinity, RoutedRequest

_SAME = ("architecture", "vocab_size", "hidden_size", "max_model_len", "block_size", "kv_cache_dtype")

logger = logging.getLogger(__name__)


class _Prefill(NamedTuple):
    """A prompt that is computed for the request of an `engine` which answers, and where."""

    engine: int
    session: Session
    route: RoutedRequest


class RemotePrefill:
    """The prefill engines, which compute prompts of at least `min_tokens` tokens.

    They are a set like that of the engines that answer, with the same numbers, and may be none. Of several, each prompt
    goes to the one that has the most of it cached, load considered. Without any, the engines that answer compute all.
    """

    def __init__(self, min_tokens: int, security: Security, numbers: Iterator[int], *, can_fetch: bool) -> None:
        """`numbers`: those of the engines to come. `can_fetch`: they fetch prefixes from one another too."""
        router = PrefixAffinity()
        router.can_fetch = can_fetch
        self.routing = Routing(router, is_optional=True)
        self.engines = EngineSet(self._note, self.routing, numbers=numbers, is_optional=True)
        self._min_tokens = min_tokens
        self._security = security
        self._lock = threading.Lock()  # of what follows, and of the routing
        self._open: dict[str, _Prefill] = {}  # by ids that both engines know
        self._is_away: set[int] = set()

    def join(self, address: str, timeout: float) -> int:
        """Use an engine too; return its number. Raises `EngineConnectionError` if it does not answer in `timeout` s."""
        return self.engines.join(address, reconnect_timeout=math.inf, security=self._security, timeout=timeout)

    def check(self, ready: Ready) -> None:
        """Raise `EngineConnectionError` unless the engine that answers can use the KV of these."""
        for prefill in self.engines.statuses():
            check_fetch(ready, prefill.ready, prefill.address)

    def counts(self) -> Counter[int]:
        """Return how many prompts each engine is computing."""
        with self._lock:
            return Counter(each.session.engine for each in self._open.values())

    def begin(self, request: EngineCoreRequest, engine: int) -> EngineCoreRequest:
        """Have the prompt of a request computed, if it is long; return the request for the `engine` that answers."""
        shared = None if request.shares_prompt_with is None else self._open.get(request.shares_prompt_with)
        if shared is not None:
            return self._fetching(request, shared.session.engine)
        if (
            len(request.prompt_token_ids) < self._min_tokens
            or request.shares_prompt_with is not None
            or request.pooling is not None
            or request.sampling_params.prompt_logprobs is not None  # each token has a result of its own
        ):
            return request
        tokens = request.prompt_token_ids
        salt = salt_of(request.cache_salt, request.adapter)
        route = RoutedRequest(len(tokens), lambda: tokens, salt, adapter=request.adapter)
        with self._lock:
            session = self.routing.send(route)
            if session is None:
                return request
            self._open[request.request_id] = _Prefill(engine, session, route)
        try:
            self.engines.send(self._prefill_of(request, session, route), session)
        except (EngineDeadError, ProtocolError):
            self._take([request.request_id])
            return request
        return self._fetching(request, session.engine)

    def _fetching(self, request: EngineCoreRequest, prefill: int) -> EngineCoreRequest:
        """Return a request that waits for the pages of a prefill engine."""
        try:
            source = self.engines.client(prefill).address
        except EngineDeadError:  # it has just left
            return request
        return msgspec.structs.replace(request, remote_prefill=True, kv_source=source)

    def _prefill_of(self, request: EngineCoreRequest, session: Session, route: RoutedRequest) -> EngineCoreRequest:
        """Return the request for the prompt of another request."""
        is_admin = self.engines.client(session.engine).ready.role is Role.ADMIN
        return msgspec.structs.replace(
            request,
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
            eos_token_ids=[],
            generated_token_ids=[],
            priority=request.priority if is_admin else max(0, request.priority),
            tenant=request.tenant if is_admin else "",
            kv_source=self.routing.source_of(route),
        )

    def end(self, request_ids: Sequence[str]) -> None:
        """End requests whose prompt is not needed any more. Any thread."""
        ended: dict[Session, list[str]] = {}
        for request_id, each in self._take(request_ids):
            ended.setdefault(each.session, []).append(request_id)
        for session, ids in ended.items():
            for first in range(0, len(ids), MAX_ABORTED):
                self.engines.send(Abort(ids[first : first + MAX_ABORTED]), session)

    def _take(self, request_ids: Sequence[str]) -> list[tuple[str, _Prefill]]:
        """Remove and return those of the requests that are open."""
        with self._lock:
            taken = [(each, self._open.pop(each)) for each in request_ids if each in self._open]
            for _, each in taken:
                self.routing.router.take_back(each.route)
        return taken

    def pass_on(self, message: ClientMessage, engine: int) -> ClientMessage:
        """Take note of a message; return that which the `engine` that answers is to get."""
        if not len(self.engines):
            return message
        if isinstance(message, Abort):
            self.end(message.request_ids)
        return self.begin(message, engine) if isinstance(message, EngineCoreRequest) else message

    def observe(self, delivery: Delivery) -> None:
        """Take note of what engines that answer deliver: a request with a first token needs its prompt no more."""
        if not self._open:
            return
        if isinstance(delivery, EngineCoreOutputs):
            self.end([output.request_id for output in delivery.outputs if _is_past_prompt(output)])
        elif isinstance(delivery, EngineAway | EngineLeft):
            self.end([name for name, each in list(self._open.items()) if each.engine == delivery.engine])
        elif isinstance(delivery, EngineDeadError):
            self.end(list(self._open))

    def close(self) -> None:
        """Leave the engines. Idempotent."""
        self.engines.close()

    def _note(self, delivery: Delivery) -> None:
        """Take note that an engine is gone or back. On the threads of the clients."""
        match delivery:
            case EngineBack():
                with self._lock:
                    self.routing.open(delivery.session, delivery.block_size, delivery.address)
                    was_away = delivery.session.engine in self._is_away
                    self._is_away.discard(delivery.session.engine)
                if was_away:
                    logger.warning("the prefill engine at %s is back", delivery.address)
            case EngineAway() | EngineLeft():
                with self._lock:
                    self.routing.close(delivery.engine)
                    is_news = delivery.engine not in self._is_away
                    self._is_away.add(delivery.engine)
                    lost = [name for name, each in self._open.items() if each.session.engine == delivery.engine]
                self._take(lost)
                if is_news:
                    logger.warning("a prefill engine is gone, prompts are computed without it: %s", delivery.reason)


def check_fetch(own: Ready, other: Ready, address: str) -> None:
    """Raise `EngineConnectionError` unless an engine can fetch the KV of the prefill engine at `address`."""
    if own.shape is not None and not own.shape.enable_prefix_caching:
        raise EngineConnectionError(
            f"prefill_address={address} needs an engine with a prefix cache, into which it fetches KV from there; "
            "start it with enable_prefix_caching, and with a model that has KV"
        )
    if not own.has_kv_peer and own.role is not Role.ADMIN:
        raise EngineConnectionError(
            f"prefill_address={address} needs an engine that fetches KV pages from there, and this client's role does "
            f"not allow it to name one; start the engine with --kv-peer {address}"
        )
    for name in _SAME:
        if getattr(own, name) != getattr(other, name):
            raise EngineConnectionError(
                f"the engine at prefill_address={address} has {name} {getattr(other, name)}, and the one that answers "
                f"{getattr(own, name)}; start both with the same model and options"
            )
    if (lack := missing_adapters(other.adapters, own.adapters)) is not None:
        raise EngineConnectionError(
            f"the engine at prefill_address={address} {lack}, unlike the one that answers; start both with the same "
            "LoRA options"
        )


def _is_past_prompt(output: EngineCoreOutput) -> bool:
    return bool(output.new_token_ids) or output.finish_reason is not None
