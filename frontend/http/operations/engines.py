"""`/engines`: the engines that share the requests of the server, which come and go while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.client.engine_set import EngineStatus
from quire.frontend.errors import EngineConnectionError, EngineDeadError
from quire.frontend.http.errors import ApiError, bad_request
from quire.frontend.http.service import Endpoints, ModelService
from quire.frontend.http.transport.auth import AdminKeys
from quire.frontend.http.transport.bodies import Body
from quire.frontend.http.transport.responses import json_response

_MOST_ADDRESS = 4096


class EngineCard(msgspec.Struct, kw_only=True):
    """An engine.

    `state`: ready, draining (it gets no more requests) or away. `supervised`: the server has started it, and starts it
    again when it dies. `prefill`: it computes prompts for the others. `device`: cpu, or a GPU as cuda:0, whose bits
    are not the CPU's with `fast_matmul`. `losses`: times that it was lost. `requests`: those of this server that it has
    now; `routed`: how many it was sent ever, by reason.
    """

    number: int
    address: str
    state: str
    supervised: bool
    prefill: bool
    device: str
    fast_matmul: bool
    pid: int
    losses: int
    requests: int
    routed: dict[str, int]


class EngineList(msgspec.Struct, kw_only=True):
    """The engines, and the router that chooses among them."""

    router: str
    engines: list[EngineCard]


class AddEngineBody(Body, kw_only=True):
    """The address of a running engine, which computes prompts for the others only if it is to."""

    address: Annotated[str, Meta(min_length=1, max_length=_MOST_ADDRESS)]
    prefill: Annotated[bool, Meta(description="It computes prompts for the other engines only.")] = False


class DrainEngineBody(Body, kw_only=True):
    """No options."""


class RemoveEngineBody(Body, kw_only=True):
    """The longest time for which the requests of an engine that is to be removed may go on there."""

    drain_timeout: Annotated[float, Meta(ge=0, le=1e9, description="Seconds. Default: 60.")] | None = None


def engine_number(given: str, known: Sequence[int] | None) -> int:
    """Return the number of one of the `known` engines, None for a model whose engines are not there yet.

    Raises `ApiError` 404 for another.
    """
    number = int(given) if given.isdecimal() and len(given) < 10 else -1
    if number >= 0 and (known is None or number in known):
        return number
    there = "the model is not loaded" if known is None else f"the engines are {', '.join(map(str, known))}"
    raise ApiError(404, f"there is no engine {given[:100]!r}; {there}", code="engine_not_found")


class EngineEndpoints(Endpoints):
    """Handlers of the endpoints of the set of engines. Those that change it need the admin key, if there are keys."""

    def __init__(self, service: ModelService) -> None:
        super().__init__(service)
        self._admins = AdminKeys(service.args.admin_keys())
        self._is_open = not self._admins and not service.args.all_api_keys()

    async def list(self, _request: Request) -> Response:
        """List the engines that share the requests, and those that compute prompts for them."""
        return json_response(self._list())

    async def add(self, request: Request) -> Response:
        """Let a running engine share the requests."""
        self._check_admin(request)
        body = await self._service.read(request, AddEngineBody)
        if self._service.server.unloads_models:
            raise bad_request(
                "this server unloads models that nobody uses, and would forget an engine that is added; add engines to "
                "one that serves a single model without --idle-timeout",
                code="unsupported",
            )
        try:
            await self._service.llm.add_engine(body.address, is_prefill=body.prefill)
        except (ValueError, EngineConnectionError, EngineDeadError) as error:
            raise bad_request(str(error), "address") from None
        return json_response(self._list())

    async def drain(self, request: Request) -> Response:
        """Send an engine no more requests; those that it has go on there."""
        self._check_admin(request)
        number = self._number(request)
        try:
            await self._service.llm.drain_engine(number)
        except ValueError as error:
            raise ApiError(409, str(error), code="engine_needed") from None
        return json_response(self._list())

    async def remove(self, request: Request) -> Response:
        """Remove an engine when its requests have ended, or move them to others after a time. It ends if the server
        has started it.
        """
        self._check_admin(request)
        number = self._number(request)
        body = await self._service.read(request, RemoveEngineBody)
        timeout = {} if body.drain_timeout is None else {"drain_timeout": body.drain_timeout}
        try:
            await self._service.llm.remove_engine(number, **timeout)
        except ValueError as error:
            raise ApiError(409, str(error), code="engine_needed") from None
        return json_response(self._list())

    def _number(self, request: Request) -> int:
        """Return the number in the path. Raises `ApiError` 404 unless it is an engine's."""
        known = [engine.number for engine in self._service.llm.engines()]
        return engine_number(request.path_params["number"], known)

    def _check_admin(self, request: Request) -> None:
        """Raise `ApiError` 403 for a request without the admin key."""
        if not self._is_open:
            self._admins.check(request, "changing the engines")

    def _list(self) -> EngineList:
        llm = self._service.llm
        counts = llm.num_requests() + llm.num_prefills()
        return EngineList(
            router=llm.router, engines=[self._card(engine, counts[engine.number]) for engine in llm.engines()]
        )

    def _card(self, engine: EngineStatus, num_requests: int) -> EngineCard:
        llm, name = self._service.llm, str(engine.number)
        return EngineCard(
            number=engine.number,
            address=engine.address,
            state=engine.state,
            supervised=engine.supervised,
            prefill=engine.is_prefill,
            device=engine.ready.device,
            fast_matmul=engine.ready.fast_matmul,
            pid=engine.ready.engine_pid,
            losses=engine.num_losses,
            requests=num_requests,
            routed={reason: count for (number, reason), count in llm.routed().items() if number == name},
        )
