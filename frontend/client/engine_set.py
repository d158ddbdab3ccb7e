"""The engines of a client: those that it has started, and those that it has joined. They come and go while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from quire.frontend.client.engine_client import (
    CoreClient,
    Delivery,
    EngineBack,
    EngineLeft,
    ReconnectPolicy,
)
from quire.frontend.client.merged_stats import merged
from quire.frontend.client.missing_adapters import missing_adapters
from quire.frontend.client.routing import Routing, Session
from quire.frontend.client.supervisor import Supervisor
from quire.frontend.errors import EngineConnectionError, EngineDeadError
from quire.protocol.host import HOST, Host
from quire.protocol.messages import (
    MAX_NAMED_PEERS,
    ClientMessage,
    EngineCoreOutputs,
    KvPeers,
    PrefixReport,
    Ready,
    Reload,
    Role,
    StepTrace,
    WatchPrefixes,
)

_SAME = ("architecture", "vocab_size", "hidden_size", "max_model_len", "eos_token_ids")
_LONGEST_STEP = 30.0  # seconds; an engine whose step takes longer gets no requests while there are others
_LONGEST_GAP = 10.0  # seconds between two attempts to reach an engine; after more, this process was suspended

_SALTS_AT_ONCE = 1024

EngineState = Literal["ready", "draining", "away"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStatus:
    """An engine of a set as its users see it.

    `supervised`: this process has started it, and starts it again. `is_prefill`: it computes prompts for the others.
    """

    number: int
    address: str
    state: EngineState
    supervised: bool
    num_losses: int
    ready: Ready
    is_prefill: bool = False


@dataclass(eq=False)
class _Member:
    """An engine, its connection, and its supervisor if it was started here."""

    client: CoreClient
    supervisor: Supervisor | None = None
    is_draining: bool = False

    @property
    def state(self) -> EngineState:
        """Its state."""
        if self.client.dead is not None or self.client.away is not None:
            return "away"
        return "draining" if self.is_draining else "ready"

    def close(self) -> None:
        """Leave the engine, and end it if it was started here."""
        self.client.close()
        if self.supervisor is not None:
            self.supervisor.stop()


class EngineSet:
    """The engines that a client's requests go to, each with a number that no later one has.

    `deliver` gets what they deliver, each on a thread of its own: see `CoreClient`. An engine that is gone for good
    leaves the set, and its requests go on in the others; an `EngineDeadError` comes once none is left. Methods may be
    called from any thread. All engines have the same model with the same context length.
    """

    def __init__(
        self,
        deliver: Callable[[Delivery], None],
        routing: Routing,
        host: Host = HOST,
        *,
        numbers: Iterator[int] | None = None,
        is_optional: bool = False,
    ) -> None:
        """`numbers`: those of the engines to come. `is_optional`: the set may be empty, and waits for lost engines."""
        self._deliver = deliver
        self._routing = routing
        self._host = host
        self._numbers = numbers or itertools.count()
        self._is_optional = is_optional
        self._traced: CoreClient | None = None
        self._lock = threading.RLock()
        self._introducing = threading.Lock()
        self._members: dict[int, _Member] = {}
        self._silent: set[int] = set()  # engines that do not tell what they have cached
        self._num_losses = 0  # of engines that have left
        self._dead: EngineDeadError | None = None
        self._waited = 0.0  # seconds that no engine has been there
        self._last_outage: float | None = None  # time at which none was there
        self._sources: list[str] = []  # further engines from which these fetch
        self._is_introduced = False  # the engines have been told of peers
        routing.watch = self.watch

    def join(
        self,
        address: str,
        supervisor: Supervisor | None = None,
        *,
        reconnect_timeout: float,
        check: Callable[[Ready], None] = lambda _ready: None,
        **options: Any,
    ) -> int:
        """Connect to an engine, and let requests go to it after the delivery of an `EngineBack`; return its number.

        `supervisor`: that of an engine that was started here. `reconnect_timeout`: seconds that all engines may be gone
        before the set gives up; those of a supervisor are waited for. `check` raises `EngineConnectionError` for an
        engine that is of no use. `options` are further ones of `CoreClient`. Raises `EngineConnectionError`, also if
        the engine is not like the others.
        """
        number = next(self._numbers)
        client = CoreClient(
            address,
            lambda delivery: self._take(number, delivery),
            reconnect=self._policy(number, supervisor, reconnect_timeout),
            engine=number,
            is_started=False,
            **options,
        )
        try:
            check(client.ready)
            with self._lock:
                self._check(client)
                self._members[number] = _Member(client, supervisor)
                self._deliver(EngineBack(client.session, client.ready.block_size, client.address))
        except BaseException:
            client.close()
            raise
        client.start()
        self._introduce()
        return number

    def _policy(self, number: int, supervisor: Supervisor | None, timeout: float) -> ReconnectPolicy:
        """Return for how long to wait for an engine that is gone; at most as long as there are others."""

        def longest_step() -> float:
            has_others = any(member.state == "ready" for other, member in self._sorted() if other != number)
            return _LONGEST_STEP if has_others else math.inf

        if supervisor is not None:
            return ReconnectPolicy(math.inf, lambda: supervisor.failure, longest_step=longest_step)
        if self._is_optional:
            return ReconnectPolicy(math.inf, outlives_engine=True, longest_step=longest_step)
        if timeout == 0:
            return ReconnectPolicy(0)
        return ReconnectPolicy(math.inf, lambda: self._outage(timeout), longest_step=longest_step)

    def _outage(self, most: float) -> EngineDeadError | None:
        """Return the error of a set that has had no engine for longer than `most` seconds; None if it hasn't."""
        with self._lock:
            now, last = self._host.monotonic(), self._last_outage
            away = self.away
            self._last_outage = None if away is None else now
            if away is None or last is None:
                self._waited = 0.0
                return None
            self._waited += min(now - last, _LONGEST_GAP)
            if self._waited < most:
                return None
            return EngineDeadError(f"{away}, and no engine has come back within {most:g} s", self.address)

    def _check(self, client: CoreClient) -> None:
        """Raise `EngineConnectionError` for an engine that is here already, or that differs from the others."""
        if self._dead is not None:
            raise EngineConnectionError(f"there are no engines any more, and none can join: {self._dead.summary}")
        own, address = client.ready, client.address
        for member in self._members.values():
            ready, other = member.client.ready, member.client.address
            if address == other:
                raise EngineConnectionError(f"the engine at {address} is in use already; give another one")
            if own.role is not ready.role:
                raise EngineConnectionError(
                    f"this client has the role {own.role} at the engine at {address}, and {ready.role} at the one at "
                    f"{other}; give the keys with which it has the same"
                )
            if own.text_files != ready.text_files:
                raise EngineConnectionError(
                    f"the engine at {address} has another tokenizer or chat template than the one at {other}; start "
                    "all of them with the same model"
                )
            if (lack := missing_adapters(own.adapters, ready.adapters)) is not None:
                raise EngineConnectionError(
                    f"the engine at {address} {lack}, unlike the one at {other}; start all of them with the same LoRA "
                    "options"
                )
            for name in _SAME:
                if getattr(own, name) != getattr(ready, name):
                    raise EngineConnectionError(
                        f"the engine at {address} has {name} {getattr(own, name)}, and the one at {other} "
                        f"{getattr(ready, name)}; start all of them with the same model and options"
                    )

    def remove(self, number: int) -> None:
        """Leave an engine, and end it if it was started here; an `EngineLeft` is delivered.

        Raises `ValueError` if it is not there any more, or the only one that is.
        """
        with self._lock:
            self._check_spare(number)
            member = self._members.pop(number)
            self._num_losses += member.client.num_losses
            self._deliver(EngineLeft("it was removed", number))  # after which no other news of it is delivered
        self._introduce()
        member.close()

    def set_draining(self, number: int, *, is_draining: bool = True) -> None:
        """Note that an engine is to get no more requests, or is to get some again.

        Raises `ValueError` if it is not there, or the only one that gets requests.
        """
        with self._lock:
            if is_draining:
                self._check_spare(number)
            if number in self._members:
                self._members[number].is_draining = is_draining

    def _check_spare(self, number: int) -> None:
        if number not in self._members:
            known = ", ".join(map(str, sorted(self._members)))
            raise ValueError(f"there is no engine {number}; the engines are {known}")
        others = [member for other, member in self._members.items() if other != number]
        is_last_there = self._members[number].state != "away" and not any(each.state == "ready" for each in others)
        if not self._is_optional and (is_last_there or all(each.is_draining for each in others)):
            raise ValueError(f"engine {number} is the last one that takes requests; add another one first")

    def statuses(self) -> list[EngineStatus]:
        """Return all engines, in the order in which they came."""
        return [
            EngineStatus(
                number,
                member.client.address,
                member.state,
                member.supervisor is not None,
                member.client.num_losses,
                member.client.ready,
            )
            for number, member in self._sorted()
        ]

    def _sorted(self) -> list[tuple[int, _Member]]:
        with self._lock:
            return sorted(self._members.items())

    def __len__(self) -> int:
        return len(self._members)

    @property
    def supervisors(self) -> list[Supervisor]:
        """The supervisors of the engines that were started here."""
        return [member.supervisor for _, member in self._sorted() if member.supervisor is not None]

    # What a client of one engine has, of all of them

    @property
    def first(self) -> CoreClient:
        """The client of the first engine that is there, or of the first one."""
        members = [member for _, member in self._sorted()]
        return next((each for each in members if each.state != "away"), members[0]).client

    @property
    def ready(self) -> Ready:
        """The description of the first engine; the others differ in addresses and processes only."""
        return self.first.ready

    @property
    def address(self) -> str:
        """The address of the first engine."""
        return self.first.address

    @property
    def dead(self) -> EngineDeadError | None:
        """Reason for which there will be no engine any more; None while there may be one."""
        return self._dead

    @property
    def away(self) -> str | None:
        """Reason for which there is no engine now; None if there is one."""
        reasons = [member.client.away for _, member in self._sorted()]
        return None if None in reasons else reasons[0]

    @property
    def num_losses(self) -> int:
        """Times that an engine, or the connection to one, was lost."""
        return self._num_losses + sum(member.client.num_losses for _, member in self._sorted())

    @property
    def last_step_age(self) -> float:
        """Seconds since the last step of the engine that has stepped last, while there is something to do."""
        return min(member.client.last_step_age for _, member in self._sorted())

    def send(self, message: ClientMessage, session: Session) -> None:
        """Queue a message for the engine of a session, unless that is over.

        Raises `EngineDeadError` if there will be no engine any more, `ProtocolError` if the message is too large.
        """
        if self._dead is not None:
            raise EngineDeadError(*self._dead.args)
        member = self._members.get(session.engine)
        if member is None:  # it has left, and its requests are sent again
            return
        try:
            member.client.send(message, session)
        except EngineDeadError:
            if self._dead is not None:
                raise

    def call(self, method: str, *args: Any, engine: int | None = None, **options: Any) -> Future[Any]:
        """Start a utility call of one engine, None for the first one that is there; see `CoreClient.call`."""
        return self.client(engine).call(method, *args, **options)

    def client(self, engine: int | None) -> CoreClient:
        """Return the client of an engine, None for the first one. Raises `EngineDeadError` if it is not in the set."""
        if engine is None:
            return self.first
        if (member := self._members.get(engine)) is None:
            raise EngineDeadError(f"there is no engine {engine}")
        return member.client

    def call_each(self, method: str, *args: Any, **options: Any) -> dict[int, Future[Any]]:
        """Start a utility call of each engine that is there. Raises `EngineDeadError` if none is."""
        calls: dict[int, Future[Any]] = {}
        for number, member in self._sorted():
            with contextlib.suppress(EngineDeadError):  # it is away
                calls[number] = member.client.call(method, *args, **options)
        return calls or {0: self.call(method, *args, **options)}

    async def stats(self) -> dict[str, Any]:
        """Return the sums of the statistics of all engines that are there. Raises `EngineDeadError` if none is."""
        return merged(list((await self.stats_each()).values()))

    async def stats_each(self, timeout: float | None = None) -> dict[int, dict[str, Any]]:  # noqa: ASYNC109
        """Return the statistics of each engine that answers within `timeout` seconds, by its number.

        Raises `EngineDeadError` if there is no engine, `TimeoutError` if none answers.
        """
        calls = self.call_each("stats")
        answers = (asyncio.wait_for(asyncio.wrap_future(call), timeout) for call in calls.values())
        results = await asyncio.gather(*answers, return_exceptions=True)
        found = {number: each for number, each in zip(calls, results, strict=True) if isinstance(each, dict)}
        if not found:
            raise next(each for each in results if isinstance(each, BaseException))
        return found

    def reload(self, arguments: Reload) -> Ready:
        """Have another engine take the place of each, one after the other; see `CoreClient.reload`.

        Raises `RuntimeError` before the first one if an engine is away, and if one fails, after which the others are as
        they were.
        """
        members = self._sorted()
        if away := [str(number) for number, member in members if member.state == "away"]:
            raise RuntimeError(f"engine {', '.join(away)} is away; reload when all are there, or remove it")
        done: list[str] = []
        for number, member in members:
            try:
                ready = member.client.reload(arguments)
            except (RuntimeError, EngineDeadError) as error:
                if len(members) == 1:
                    raise
                changed = f"engine {', '.join(done)} has the new settings already" if done else "no engine has changed"
                raise RuntimeError(f"engine {number}: {error}; {changed}") from error
            done.append(str(number))
        return ready

    def start_trace(self, on_step: Callable[[StepTrace], None], engine: int | None = None) -> Future[Any]:
        """Start tracing an engine, None for the first one; see `CoreClient.start_trace`."""
        self._traced = self.client(engine)
        return self._traced.start_trace(on_step)

    def stop_trace(self) -> Future[Any]:
        """Stop tracing the engine that is traced, or the first one."""
        return (self._traced or self.first).stop_trace()

    def close(self) -> None:
        """Leave all engines, and end those that were started here. Idempotent."""
        closing = [threading.Thread(target=member.close) for _, member in self._sorted()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def watch(self, session: Session, salts: list[str]) -> None:
        """Have an engine report the prefixes of some salts, as many at once as a message has room for."""
        if session.engine in self._silent:
            return
        for first in range(0, len(salts), _SALTS_AT_ONCE):
            with contextlib.suppress(EngineDeadError):  # the next session begins with them
                self.send(WatchPrefixes(salts[first : first + _SALTS_AT_ONCE]), session)

    def fetch_from(self, addresses: Sequence[str]) -> None:
        """Let the engines fetch KV pages from the ones at these addresses too, which are not in the set."""
        with self._introducing:
            self._sources = list(addresses)
        self._introduce()

    def _introduce(self) -> None:
        """Tell each engine of those from which it may fetch: the others, if the router knows what they have."""
        with self._introducing:  # so that no engine gets an older list after a newer one
            self._send_peers()

    def _send_peers(self) -> None:
        clients = [member.client for _, member in self._sorted()]
        of_set = [client.address for client in clients] if self._routing.router.can_fetch and len(clients) > 1 else []
        addresses = [*self._sources, *of_set]
        if not addresses and not self._is_introduced:
            return
        self._is_introduced = True
        for client in clients:
            if client.ready.role is Role.ADMIN:
                others = [address for address in addresses if address != client.address]
                with contextlib.suppress(EngineDeadError):  # it is away, and is told when it is back
                    client.send(KvPeers(others[:MAX_NAMED_PEERS]))

    # On the threads of the clients

    def _take(self, number: int, delivery: Delivery) -> None:
        """Pass on what an engine delivers, but for its end if there are others."""
        if isinstance(delivery, PrefixReport):
            if delivery.refusal and number not in self._silent:
                self._silent.add(number)
                logger.warning("engine %d does not tell what it has cached: %s", number, delivery.refusal)
            self._routing.router.report(number, delivery)
            return
        if isinstance(delivery, EngineCoreOutputs):
            if delivery.stats is not None and len(self._members) > 1:
                self._routing.router.observe(number, delivery.stats)
            self._deliver(delivery)
            return
        with self._lock:
            if number in self._members:  # else it has been removed
                self._deliver(self._bury(number, delivery) if isinstance(delivery, EngineDeadError) else delivery)
        if isinstance(delivery, EngineBack | EngineDeadError):
            self._introduce()

    def _bury(self, number: int, error: EngineDeadError) -> EngineLeft | EngineDeadError:
        """Remove an engine that is gone for good, with the lock held; return what is to be delivered."""
        if len(self._members) == 1 and not self._is_optional:
            self._dead = error
            return error
        member = self._members.pop(number)
        self._num_losses += member.client.num_losses
        logger.error("engine %d at %s has left the set: %s", number, member.client.address, error)
        if member.supervisor is not None:
            threading.Thread(target=member.supervisor.stop, name="quire-engine-end", daemon=True).start()
        return EngineLeft(error.summary, number)
