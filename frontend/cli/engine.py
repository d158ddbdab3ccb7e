"""`quire engine`, and `quire keys` for its clients."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.frontend.cli.flags import EngineFlags, EngineProcessFlags, takes_flags
from quire.frontend.cli.output import write
from quire.protocol.engine_options import ClientOptions, EngineProcessOptions, HubOptions, SupervisionOptions
from quire.protocol.options import options_of

if TYPE_CHECKING:
    from quire.frontend.client.supervisor import Supervisor


@takes_flags
def engine(*, process: EngineProcessFlags, engine: EngineFlags) -> None:
    """Run an engine without a frontend.

    It prints `READY <address>` whenever others can attach with --engine-address. SIGTERM lets running requests finish,
    Ctrl-C aborts them.
    """
    from quire.frontend.client.supervisor import ProcessTimeouts, Supervisor
    from quire.frontend.engine_args import DEMO_MODEL
    from quire.frontend.hub.resolve import resolve_model
    from quire.frontend.text.tokenizer_trial import check_tokenizer
    from quire.protocol.address import listed

    given = {"model": DEMO_MODEL, **engine.given, **process.given}
    hub = {name: given.pop(name) for name in options_of(HubOptions) if name in given}
    given["model"] = str(resolve_model(given["model"], **hub))
    check_tokenizer(given["model"])
    supervised = {name: given.pop(name) for name in options_of(SupervisionOptions) if name in given}
    shutdown_timeout = given.pop("shutdown_timeout", options_of(EngineProcessOptions)["shutdown_timeout"].default)
    start_timeout = given.pop("start_timeout", options_of(ClientOptions)["start_timeout"].default)
    chosen = given.pop("engine_address", None)
    with listed(chosen) as address:
        supervisor = Supervisor(
            address,
            given,
            SupervisionOptions(**supervised),
            timeouts=ProcessTimeouts(start_timeout, shutdown_timeout),
            on_ready=lambda address: print("READY", address, flush=True),
        )
        with _ended_by_signals(supervisor) as received:
            supervisor.wait_ready()
            supervisor.join()
    if supervisor.failure is not None:
        raise supervisor.failure
    if received[:1] == [signal.SIGINT]:
        raise KeyboardInterrupt
    if received:
        raise SystemExit(128 + received[0])


@contextmanager
def _ended_by_signals(supervisor: Supervisor) -> Iterator[list[int]]:
    """End the engine with the `with`, and at SIGTERM and SIGHUP in its time, at SIGINT at once.

    Yields the signals, in the order in which they come.
    """
    received: list[int] = []

    def end(number: int, _frame: object) -> None:
        how = supervisor.interrupt if number == signal.SIGINT and not received else supervisor.stop
        received.append(number)
        threading.Thread(target=how).start()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        yield received
    finally:
        supervisor.stop()
        for number, handler in before.items():
            signal.signal(number, handler)


@takes_flags
def keys(folder: Annotated[Path, typer.Argument(help="Folder for the keys; created if it does not exist.")]) -> None:
    """Generate CURVE keys, with which an engine can listen on tcp://.

    The engine needs the folder. A client on another host needs its file engine.public, and client.secret, or
    admin.secret if it may also use what concerns other clients: traces, the prefix cache, shutdown.
    """
    from quire.protocol.keys import generate_keys

    generate_keys(folder)
    write(f"keys written; use them with: quire engine --engine-address tcp://0.0.0.0:5555 --curve-keys {folder}\n")
