"""`quire reload`."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from quire.frontend.cli.flags import ReloadFlags, SocketFlags, option, takes_flags
from quire.frontend.cli.output import say

if TYPE_CHECKING:
    from quire.frontend.client.engine_client import CoreClient

_RECONNECT_SECONDS = 600.0  # for the new engine to take over


@takes_flags
def reload(
    drain: Annotated[
        bool | None,
        typer.Option(
            "--drain/--move",
            help="Let requests that have begun end in the engine before. Default: all move to the new one at once.",
            show_default=False,
            metavar="",
        ),
    ] = None,
    drain_timeout: Annotated[
        float | None,
        option(None, "Seconds that --drain gives requests; then they move. Default: 60.", "S", min=0.0),
    ] = None,
    *,
    socket: SocketFlags,
    changes: ReloadFlags,
) -> None:
    """Put a new engine with other weights or settings in the place of a running one, while streams go on.

    The new engine loads its model while the one before works. Then open requests go on in it where they were. If it
    cannot be started, the one before works on, and the command fails with the reason. Options that are not given stay
    as they are. Without --engine-address: the only engine that this user runs on this machine.
    """
    from quire.frontend.engine_args import DRAIN_SECONDS, reload_arguments

    if drain_timeout is not None and not drain:
        raise typer.BadParameter("--drain-timeout applies to --drain; give that as well, or leave it out")
    timeout = DRAIN_SECONDS if drain_timeout is None else drain_timeout
    try:
        arguments = reload_arguments(changes.given, drain=bool(drain), drain_timeout=timeout)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with closing(_connect(socket)) as client:
        ready = client.reload(arguments)
    model = f"the model {ready.model} on {ready.device}"
    say(f"the engine at {client.address} is process {ready.engine_pid} now, with {model}")


def _connect(flags: SocketFlags) -> CoreClient:
    """Connect to the engine, the only one if no address is given. Raises `EngineConnectionError`, `BadParameter`."""
    from quire.frontend.client.engine_client import CoreClient, ReconnectPolicy
    from quire.protocol.engine_options import SocketOptions

    address = flags.engine_address or _only_address()
    given = {name: value for name, value in flags.given.items() if name != "engine_address"}
    security = SocketOptions(**given).security
    return CoreClient(address, lambda _delivery: None, security=security, reconnect=ReconnectPolicy(_RECONNECT_SECONDS))


def _only_address() -> str:
    from quire.protocol.address import is_alive, listed_addresses

    alive = [address for address in listed_addresses() if is_alive(address)]
    if len(alive) == 1:
        return alive[0]
    found = f"{len(alive)} of your engines run here ({', '.join(alive)})" if alive else "no engine of yours runs here"
    raise typer.BadParameter(f"{found}; name one with --engine-address")
