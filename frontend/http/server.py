"""The HTTP server process: serve until a signal arrives or the engine ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from quire.frontend.http.app import make_app
from quire.frontend.http.args import ServerArgs
from quire.frontend.http.models.served_models import ServedModels
from quire.frontend.http.transport.protocol import protocol_factory

_SWITCH_SECONDS = 1e-4
_FULL_COLLECTION = 100  # collections of the middle generation before one of everything: 20 to 100 ms in a flood
_FAREWELL_SECONDS = 2.0  # for the last event of each stream that is cut off


class HttpServer(uvicorn.Server):
    """uvicorn's server with our own signals and shutdown. `on_started` is called once it accepts connections."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None], drain_seconds: float) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._drain_seconds = drain_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for open answers up to the drain limit, then stop accepting, cut them off and close all connections.

        Until then, health checks and new requests get their answer: that the server is shutting down. uvicorn's own
        closes idle connections first, so that their clients never get a reason, and cuts answers off without a last
        event.
        """
        tasks = self.server_state.tasks
        open_tasks = set(tasks)  # not those that come later: a health check a millisecond would never let this end
        end = time.monotonic() + self._drain_seconds
        while open_tasks and not self.force_exit and (left := end - time.monotonic()) > 0:
            _, open_tasks = await asyncio.wait(open_tasks, timeout=min(left, 0.1))
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        for task in set(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(set(tasks), timeout=_FAREWELL_SECONDS)
        await self._close_connections()

    async def _close_connections(self) -> None:
        """Close all connections once their buffers are empty, or after a time limit."""
        connections = self.server_state.connections
        for connection in set(connections):
            connection.transport.close()
        end = time.monotonic() + _FAREWELL_SECONDS
        while connections and time.monotonic() < end:  # noqa: ASYNC110 - they leave the set without an event
            await asyncio.sleep(0.01)
        for connection in set(connections):
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `Serving`."""
        yield


class Serving:
    """Serves models on the running event loop."""

    def __init__(self, models: ServedModels, listener: socket.socket, on_started: Callable[[Serving], None]) -> None:
        self.models = models
        self._listener = listener
        args = models.server.args
        config = _config(args, make_app(models))
        self._server = HttpServer(config, lambda: on_started(self), args.shutdown_timeout)
        self._warming: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The server's URL; for a UNIX socket `unix:PATH`."""
        args = self.models.server.args
        if args.uds is not None:
            return f"unix:{args.uds}"
        host, port = self._listener.getsockname()[:2]
        name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
        return f"{'https' if args.ssl_certfile else 'http'}://{name}:{port}{args.root_path}"

    async def run(self) -> signal.Signals | None:
        """Serve until SIGTERM or SIGHUP, which drain open requests, or SIGINT, which does not.

        Returns the signal, None if the engine of its only model has died. All models are unloaded then.
        """
        loop = asyncio.get_running_loop()
        received: list[signal.Signals] = []

        def end(number: signal.Signals) -> None:
            self._server.force_exit = bool(received) or number is signal.SIGINT
            received.append(number)
            self._end()

        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
        handled = [
            number for number, handler in before.items() if handler is not signal.SIG_IGN
        ]  # nohup ignores SIGHUP
        for number in handled:
            loop.add_signal_handler(number, end, number)
        watcher = asyncio.create_task(self._watch_engine())
        self._warming = asyncio.create_task(self.models.loader.start())
        try:
            await asyncio.wait({self._warming})
            if not self._warming.cancelled():
                self._warming.result()
                _tune_interpreter()
                await self._server.serve(sockets=[self._listener])
        finally:
            watcher.cancel()
            await self.models.loader.close()
            for number in handled:
                loop.remove_signal_handler(number)
                signal.signal(number, before[number])
        return received[-1] if received else None

    def _end(self) -> None:
        self.models.server.draining = True
        self._server.should_exit = True
        if self._warming is not None:  # the chat template may take long
            self._warming.cancel()

    async def _watch_engine(self) -> None:
        """End when the engine does, after its requests have got their errors."""
        await self.models.loader.wait_dead()
        self._end()


def _tune_interpreter() -> None:
    """Let the event loop soon have the GIL that another thread holds, and the garbage collector skip what is loaded.

    It seldom goes through everything else either: requests leave nothing behind that only it could free.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _FULL_COLLECTION)


def _config(args: ServerArgs, app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",  # the caller's loop runs it
        http=protocol_factory(args),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        headers=[("Server", "quire")],
        root_path=args.root_path,
        backlog=4096,
        timeout_keep_alive=max(1, round(args.keep_alive)),
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        ssl_keyfile_password=args.ssl_keyfile_password,
    )
