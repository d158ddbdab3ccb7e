"""The choice of an engine for each request, among those that a client is connected to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from quire.frontend.client.observer import OpenRequest
from quire.protocol.messages import MAX_WATCHED_SALTS
from quire.protocol.routing.routers import ROUTERS, RoundRobin, RoutedRequest, Router


class Session(NamedTuple):
    """A session with one engine of a client's; the sessions with the same engine are numbered from 1."""

    engine: int
    number: int


FIRST_SESSION = Session(0, 1)


class Routing:
    """The sessions that are open, and the router that chooses among them.

    `watch(session, salts)` is called to have an engine report the prefixes of some salts, if the router wants that.
    """

    def __init__(self, router: Router | None = None, *, is_optional: bool = False) -> None:
        """Without a router, engines take turns. `is_optional`: no engine is better than one that is draining."""
        self.router = router or RoundRobin()
        self.watch: Callable[[Session, list[str]], None] = lambda _session, _salts: None
        self.counts: Counter[tuple[int, str]] = Counter()  # of requests by engine and reason
        self._is_optional = is_optional
        self._sessions: dict[int, Session] = {}
        self._block_sizes: dict[int, int] = {}
        self._addresses: dict[int, str] = {}
        self._draining: set[int] = set()
        self._ending: set[int] = set()  # engines that end in their present session
        self._salts: dict[str, None] = {}  # of all requests
        self._watched: set[Session] = set()  # sessions whose engines report the prefixes of these salts

    @property
    def name(self) -> str:
        """The name of the router."""
        return next(name for name, kind in ROUTERS.items() if type(self.router) is kind)

    def open(self, session: Session, block_size: int = 1, address: str = "") -> None:
        """Add a session with an engine whose KV pages have `block_size` tokens; it has none of the requests.

        `address`: where other engines can reach it.
        """
        if self._sessions.get(session.engine) == session:
            return
        self.close(session.engine)
        self._ending.discard(session.engine)
        self.router.add(session.engine, block_size)
        self._sessions[session.engine] = session
        self._block_sizes[session.engine] = block_size
        self._addresses[session.engine] = address
        if self.router.watches_prefixes and len(self._sessions) > 1:
            self._watch_all(session)

    def use(self, router: Router) -> None:
        """Use another router, before there have been requests."""
        self.router = router
        for engine in self._sessions:
            router.add(engine, self._block_sizes[engine])

    def close(self, engine: int) -> bool:
        """End the session with an engine; return False if there is none. Its requests are to be taken back."""
        if (session := self._sessions.pop(engine, None)) is None:
            return False
        self._watched.discard(session)
        self.router.remove(engine)
        return True

    def drain(self, engine: int) -> None:
        """Send no more requests to an engine, as long as there are others."""
        self._draining.add(engine)

    def undrain(self, engine: int) -> None:
        """Undo `drain`."""
        self._draining.discard(engine)

    def note_end(self, engine: int) -> None:
        """Do so until its next session: it ends."""
        self._ending.add(engine)

    def has_other(self, engine: int) -> bool:
        """Return True if requests can go to another engine."""
        return bool(self._usable - {engine})

    @property
    def _usable(self) -> set[int]:
        return self._sessions.keys() - self._draining - self._ending

    def session_of(self, engine: int) -> Session | None:
        """Return the session with an engine, None if there is none now."""
        return self._sessions.get(engine)

    def send(self, route: RoutedRequest, home: int | None = None) -> Session | None:
        """Choose an engine, and count the request as sent there; return the session with it, None if there is none.

        `home`: the only engine that comes into question.
        """
        if home is not None:
            engines = [home] if home in self._sessions and home not in self._ending else []
        else:
            engines = sorted(self._usable or (() if self._is_optional else self._sessions))
        if not engines:
            return None
        if not route.adapter:  # an engine's salts have what the files contain, which no client knows
            self._note_salt(route.salt)
        engine = self.router.send(route, engines)
        self.counts[engine, route.reason] += 1
        return self._sessions[engine]

    def source_of(self, route: RoutedRequest) -> str:
        """Return the address of an engine that has more of a prompt than the one it goes to; "" if there is none."""
        return "" if route.source is None or route.source not in self._sessions else self._addresses[route.source]

    def _note_salt(self, salt: str) -> None:
        """Have all engines report the prefixes of a salt that is new, if there are several."""
        if salt not in self._salts and len(self._salts) < MAX_WATCHED_SALTS:
            self._salts[salt] = None
            for session in self._watched:
                self.watch(session, [salt])

    def _watch_all(self, new: Session) -> None:
        """Have a new engine report the prefixes of all salts, and with a second one the first too."""
        unwatched = [session for session in self._sessions.values() if session == new or session not in self._watched]
        for session in unwatched:
            self.watch(session, list(self._salts))
        self._watched = set(self._sessions.values())


def route_of(request: OpenRequest) -> RoutedRequest:
    """Return a request as routers see it."""
    token_ids, options = request.prompt.token_ids, request.options
    return RoutedRequest(
        len(token_ids),
        lambda: token_ids,
        salt_of(options.cache_salt, options.adapter),
        options.session,
        len(request.engine_params),
        options.adapter,
    )


def salt_of(cache_salt: str, adapter: str) -> str:
    """Return the salt by which routers tell prefixes apart: KV of an adapter is no other's, nor the model's alone."""
    return f"{adapter}\n{cache_salt}" if adapter else cache_salt
