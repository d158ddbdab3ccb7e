"""State that all models of a server share: its arguments, the bounds of its memory, the stored responses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from starlette.requests import Request

from quire.frontend.http.args import ServerArgs
from quire.frontend.http.errors import ApiError, api_error, bad_request
from quire.frontend.http.response_store import ResponseStore
from quire.frontend.http.transport.arriving_bodies import ArrivingBodies
from quire.frontend.http.transport.auth import Caller
from quire.frontend.http.transport.bodies import Body, decode, read_body
from quire.frontend.http.transport.long_work import LongWork
from quire.frontend.http.transport.memory import MemoryCeiling
from quire.protocol.options import parse_size

TIMEOUT_HEADER = "x-request-timeout"

_BODIES_PART = 8  # of the server's memory, for bodies that are arriving
_BODY_BYTES = "body_bytes"  # of a request, in its scope
_LOAD_SECONDS = "load_seconds"  # for which a request has waited for its model, in its scope

B = TypeVar("B", bound=Body)

logger = logging.getLogger(__name__)


def now() -> int:
    """Return the time as responses give it: seconds since 1970."""
    return int(time.time())


@dataclass
class ServerState:
    """State that all models of a server share. `responses`: the store of responses. `created`: when the server started.

    `unloads_models`: its models are loaded and unloaded while it runs. `loads_adapters`: clients may load adapters,
    those of the hub into `download_dir`. `draining`: it is shutting down.
    """

    args: ServerArgs
    responses: ResponseStore | None = None
    loads_adapters: bool = False
    download_dir: str | None = None
    created: int = field(default_factory=now)
    long_work: LongWork = field(default_factory=LongWork)
    unloads_models: bool = False
    draining: bool = False

    def __post_init__(self) -> None:
        limit = parse_size(str(self.args.server_memory_limit))
        self.memory = MemoryCeiling(limit)
        self._arriving = ArrivingBodies(max(limit // _BODIES_PART, self.args.max_body_bytes))

    def check_open(self, retry_after: Callable[[], int]) -> None:
        """Raise `ApiError` 503 while the server is shutting down; `retry_after` returns the seconds to name in it."""
        if self.draining:
            raise ApiError(
                503,
                "the server is shutting down: it finishes open requests and accepts no new ones; send this one to "
                "another server",
                code="shutting_down",
                headers={"Retry-After": str(retry_after()), "Connection": "close"},
            )

    async def read(self, request: Request, kind: type[B]) -> B:
        """Return the body of a request. Raises `ApiError` 400, 408, 413, 415 or 503."""
        address = "" if request.client is None else request.client.host
        with self._arriving.body(address) as grow:

            def reserve(num_bytes: int) -> None:
                self.memory.check()
                grow(num_bytes)

            body = await read_body(request, self.args, reserve, kind.is_lenient)
        request.scope[_BODY_BYTES] = len(body)
        party = f"{caller_of(request).key} {address}"
        return await decode(body, kind, self.long_work.runner(party, len(body)))

    def timeout(self, request: Request) -> float | None:
        """Return the seconds that a request may take from now on: the header's, but at most the server's.

        It has waited for its model already. Raises `ApiError` 400.
        """
        text, most = request.headers.get(TIMEOUT_HEADER), self.args.request_timeout
        if text is None:
            seconds = most
        else:
            given = _seconds(text)
            seconds = given if most is None else min(given, most)
        return None if seconds is None else max(seconds - load_seconds(request), 1e-9)

    def api_error(self, error: Exception, retry_after: int) -> ApiError:
        """Return the error response for an exception; a defect is logged, and its details are kept from the client."""
        response = api_error(error, retry_after)
        if response is None:
            logger.error("a request failed because of a defect in the server", exc_info=error)
            message = f"the server failed ({type(error).__name__}); its log has the details"
            response = ApiError(500, message, code="internal")
        return response


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise bad_request(
            f"X-Request-Timeout: {text!r} is not a time; give seconds above 0 and below 1e9", "X-Request-Timeout"
        )
    return seconds


def caller_of(request: Request) -> Caller:
    """Return the sender of a request."""
    return cast("Caller", request.scope["caller"])


def body_bytes(request: Request) -> int:
    """Return the size of the body of a request, which has been read."""
    return cast("int", request.scope[_BODY_BYTES])


def load_seconds(request: Request) -> float:
    """Return the seconds for which a request has waited for its model to be loaded."""
    return cast("float", request.scope.get(_LOAD_SECONDS, 0.0))


def note_load(request: Request, seconds: float) -> None:
    """Note that a request has waited so long for its model to be loaded."""
    request.scope[_LOAD_SECONDS] = seconds
