"""`quire engine`, and `quire keys` for its clients."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.frontend.cli.flags import EngineFlags, EngineProcessFlags, takes_flags
from quire.frontend.cli.output import write
from quire.protocol.engine_options import ClientOptions, EngineProcessOptions, HubOptions, SupervisionOptions
from quire.protocol.options import options_of

if TYPE_CHECKING:
    from quire.frontend.client.supervisor import Supervisor

_LAST_PORT = 65535


@takes_flags
def engine(*, process: EngineProcessFlags, engine: EngineFlags) -> None:
    """Run an engine without a frontend, or several with --data-parallel-size.

    It prints `READY <address>` whenever others can attach to one with --engine-address. SIGTERM lets running requests
    finish, Ctrl-C aborts them.
    """
    from quire.frontend.adapters import absolute_modules, max_rank_of
    from quire.frontend.client.supervisor import MachinePart, ProcessTimeouts, Supervisor
    from quire.frontend.engine_args import DEMO_MODEL
    from quire.frontend.hub.resolve import resolve_model
    from quire.frontend.text.tokenizer_trial import check_tokenizer
    from quire.protocol.address import listed

    given = {"model": DEMO_MODEL, **engine.given, **process.given}
    hub = {name: given.pop(name) for name in options_of(HubOptions) if name in given}
    given["model"] = str(resolve_model(given["model"], **hub))
    if "lora_modules" in given:
        given["lora_modules"] = absolute_modules(given["lora_modules"], hub.get("download_dir"), max_rank_of(given))
    check_tokenizer(given["model"])
    supervised = {name: given.pop(name) for name in options_of(SupervisionOptions) if name in given}
    supervision = SupervisionOptions(**supervised)
    shutdown_timeout = given.pop("shutdown_timeout", options_of(EngineProcessOptions)["shutdown_timeout"].default)
    start_timeout = given.pop("start_timeout", options_of(ClientOptions)["start_timeout"].default)
    chosen = addresses_of(given.pop("engine_address", None), supervision.data_parallel_size)
    with ExitStack() as stack:
        addresses = [stack.enter_context(listed(address)) for address in chosen]
        supervisors: list[Supervisor] = []
        received = stack.enter_context(_ended_by_signals(supervisors))
        for address, part in zip(addresses, MachinePart.each(len(addresses)), strict=True):
            supervisors.append(
                Supervisor(
                    address,
                    given,
                    supervision,
                    timeouts=ProcessTimeouts(start_timeout, shutdown_timeout),
                    part=part,
                    on_ready=lambda address: print("READY", address, flush=True),
                )
            )
            if received:
                break
        if not received:
            for supervisor in supervisors:
                supervisor.wait_ready()
            for supervisor in supervisors:
                supervisor.join()
    failures = [supervisor.failure for supervisor in supervisors if supervisor.failure is not None]
    if failures:
        raise failures[0]
    if received[:1] == [signal.SIGINT]:
        raise KeyboardInterrupt
    if received:
        raise SystemExit(128 + received[0])


def addresses_of(given: str | None, count: int) -> list[str | None]:
    """Return the addresses of several engines, of which one is given: ports that follow, or paths with a number added.

    Raises `BadParameter` for a port that has none.
    """
    if given is None or count == 1:
        return [given] * count
    scheme, _, rest = given.partition("://")
    if scheme != "tcp":
        return [given, *(f"{given}.{index}" for index in range(1, count))]
    host, _, port = rest.rpartition(":")
    if port == "*":
        return [given] * count
    if not port.isdecimal() or int(port) + count - 1 > _LAST_PORT:
        raise typer.BadParameter(f"{count} engines need as many ports, and {given} leaves too few; give a lower one")
    return [f"tcp://{host}:{int(port) + index}" for index in range(count)]


@contextmanager
def _ended_by_signals(supervisors: list[Supervisor]) -> Iterator[list[int]]:
    """End the engines with the `with`, and at SIGTERM and SIGHUP in its time, at SIGINT at once.

    Yields the signals, in the order in which they come.
    """
    from quire.frontend.client.supervisor import stop_all

    received: list[int] = []

    def end(number: int, _frame: object) -> None:
        is_first = number == signal.SIGINT and not received
        received.append(number)
        for supervisor in supervisors:
            threading.Thread(target=supervisor.interrupt if is_first else supervisor.stop).start()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        yield received
    finally:
        stop_all(supervisors)
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
