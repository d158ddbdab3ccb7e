"""The ingress: the HTTP server of `quire serve`, in replicas that Ray Serve's proxies reach."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.client.connection import Connection
from quire.frontend.client.engine import ConnectedEngine
from quire.frontend.engine_args import DEMO_MODEL, EngineArgs
from quire.frontend.errors import EngineDeadError
from quire.frontend.http.app import make_app
from quire.frontend.http.models.served_models import ServedModels
from quire.frontend.http.server_state import ServerState
from quire.frontend.http.service import names_of
from quire.frontend.http.service_maker import ServiceMaker
from quire.frontend.http.transport.logs import configure_logging
from quire.frontend.hub.resolve import resolve_model
from quire.frontend.ray.connection import ReplicaCall, ReplicaConnection, Replicas
from quire.frontend.ray.options import ApplicationOptions
from quire.frontend.text.generation_config import model_defaults
from quire.protocol.codec import ClientDecoder
from quire.protocol.messages import Ready

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

ADDRESS = "ray:engines"
"""The address of all replicas of the engine."""

_BY_RAY = "Ray decides which engines there are; deploy the application with another number of replicas"
_CALL_SECONDS = 5.0  # for all replicas to answer a utility call


class HandleReplicas:
    """The replicas behind a handle of Ray Serve. See `Replicas`."""

    def __init__(self, handle: DeploymentHandle) -> None:
        # By value, which is gRPC: an item of a stream takes a fifth of what it takes as an object of Ray's store.
        self._handle = handle.options(_by_reference=False)
        self._streams = self._handle.options(stream=True)

    def relay(self, frame: bytes, text_files: str) -> ReplicaCall:
        """See `Replicas`."""
        return cast("ReplicaCall", self._streams.relay.remote(frame, text_files))

    async def describe(self) -> bytes:
        """See `Replicas`."""
        return cast("bytes", await self._handle.describe.remote())

    async def call_all(self, frame: bytes) -> Sequence[bytes | Exception]:
        """See `Replicas`."""
        response = self._handle.broadcast("call", frame)
        return cast(
            "list[bytes | Exception]", await response.results_async(timeout_s=_CALL_SECONDS, return_exceptions=True)
        )


class ReplicatedLLM(AsyncLLM):
    """An `AsyncLLM` whose engine is any number of replicas.

    It is to be constructed on a thread, while `loop` runs; `options` are those of clients.
    """

    def __init__(self, replicas: Replicas, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        self._replicas, self._loop = replicas, loop
        super().__init__(engine_address=ADDRESS, **options)

    def _connected(self, args: EngineArgs) -> ConnectedEngine:
        def connect(_address: object, _security: object) -> Connection:
            return cast("Connection", ReplicaConnection(self._replicas, self._loop))

        return ConnectedEngine(args, self._deliveries.put, connect=connect)

    async def add_engine(self, address: str, *, is_prefill: bool = False) -> int:
        """Raise `ValueError`."""
        del is_prefill
        raise ValueError(f"{address} can't be added: {_BY_RAY}")

    async def drain_engine(self, engine: int) -> None:
        """Raise `ValueError`."""
        raise ValueError(f"engine {engine} can't be drained: {_BY_RAY}")

    async def remove_engine(self, engine: int, *, drain_timeout: float = 0.0) -> None:
        """Raise `ValueError`."""
        del drain_timeout
        raise ValueError(f"engine {engine} can't be removed: {_BY_RAY}")


class HttpIngress:
    """The deployment of the HTTP servers: each has the tokenizer, all APIs, and the tokens of its open requests."""

    async def __init__(  # type: ignore[misc] # Ray Serve awaits it
        self, engines: DeploymentHandle, options: Mapping[str, Any]
    ) -> None:
        """Wait for a replica of the engine; `options` are the arguments of the application."""
        loop, replicas = asyncio.get_running_loop(), HandleReplicas(engines)
        parsed = ApplicationOptions.parse(options)
        ready = ClientDecoder().decode([await replicas.describe()])
        assert isinstance(ready, Ready)
        tokenizer_of = functools.partial(_tokenizer_options, parsed, ready.model)
        client = {**parsed.client, **await asyncio.to_thread(tokenizer_of)}
        self._llm = await asyncio.to_thread(ReplicatedLLM, replicas, loop, **client)
        args, model = parsed.server_args, parsed.engine.get("model") or DEMO_MODEL
        tokenizer = self._llm.tokenizer
        defaults = model_defaults(None if tokenizer is None else tokenizer.path, ready.model)
        maker = ServiceMaker(ServerState(args, None), names_of(args.served_model_name, model, DEMO_MODEL))
        configure_logging(args.log_level, args.log_format)  # type: ignore[arg-type] # the table has checked it
        self._service = maker.make(self._llm, defaults)
        await self._service.warm_up()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application that Ray Serve calls for each HTTP request."""
        return WithoutLifespan(make_app(ServedModels.of(self._service)))

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the client has failed; replicas of the engine may come and go."""
        if (error := self._llm.dead_error) is not None:
            raise EngineDeadError(*error.args)

    def __del__(self) -> None:
        """Close the client."""
        if (llm := getattr(self, "_llm", None)) is not None:
            llm.close()


class WithoutLifespan:
    """An ASGI application that needs no events of a server's lifespan, for servers that insist on them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the events of the lifespan, and pass on everything else."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        for stage in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{stage}.complete"})


def _tokenizer_options(options: ApplicationOptions, model: str) -> dict[str, str]:
    """Return where the tokenizer is, if not in the folder that the engine calls `model`: its machine is another one."""
    if "tokenizer" in options.client or Path(model).is_dir():
        return {}
    engine = options.engine
    folder = resolve_model(engine.get("model", DEMO_MODEL), engine.get("revision"), engine.get("download_dir"))
    return {"tokenizer": str(folder)}
