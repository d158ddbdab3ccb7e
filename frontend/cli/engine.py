"""`quire engine`, and `quire keys` for its clients."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from quire.frontend.cli.flags import CommonFlags, EngineFlags, changed, option, switch, takes_flags
from quire.frontend.cli.output import write

_socket = functools.partial(option, "Process and socket")


@takes_flags
def engine(
    address: Annotated[
        str | None,
        _socket("Listen at ipc://PATH or tcp://HOST:PORT. Default: a socket in a fresh private folder.", "ADDRESS"),
    ] = None,
    curve_keys: Annotated[
        Path | None, _socket("CURVE keys, as `quire keys` makes them; tcp:// requires them.", "FOLDER")
    ] = None,
    insecure_tcp: Annotated[
        bool, switch("Process and socket", "--insecure-tcp", "Allow tcp:// without keys, for all who reach the port.")
    ] = False,
    drain_seconds: Annotated[
        float | None, _socket("Maximum time that SIGTERM leaves running requests. Default: 30.", "S")
    ] = None,
    heartbeat_seconds: Annotated[float | None, _socket("Interval of heartbeats. Default: 1.", "S")] = None,
    seed: Annotated[int | None, option("Engine", "Seed for requests without one. Default: 0.", "N", min=0)] = None,
    *,
    engine: EngineFlags,
    common: CommonFlags,
) -> NoReturn:
    """Run an engine without a frontend.

    It prints `READY <address>` once others can attach with --address. SIGTERM lets running requests finish, Ctrl-C
    aborts them.
    """
    del common
    own = {
        "address": address,
        "curve_keys": curve_keys,
        "insecure_tcp": insecure_tcp or None,
        "drain_seconds": drain_seconds,
        "heartbeat_seconds": heartbeat_seconds,
        "seed": seed,
    }
    # -P: folders in the current directory must not shadow packages.
    arguments = [sys.executable, "-P", "-m", "quire.engine_core", *command_line(engine, own)]
    sys.stdout.flush()
    os.execv(sys.executable, arguments)  # noqa: S606 - the engine replaces this process, and gets its signals


def command_line(engine: EngineFlags, own: Mapping[str, object]) -> list[str]:
    """Return the flags of `python -m quire.engine_core`."""
    from quire.frontend.engine_args import DEMO_MODEL

    flags = {"model": DEMO_MODEL, **changed(engine), **own}
    arguments: list[str] = []
    for name, value in flags.items():
        if value is None:
            continue
        flag = name.replace("_", "-")
        arguments += [f"--no-{flag}"] if value is False else [f"--{flag}"]
        if not isinstance(value, bool):
            arguments.append(str(value))
    return arguments


@takes_flags
def keys(
    folder: Annotated[Path, typer.Argument(help="Folder for the keys; created if it does not exist.")],
    *,
    common: CommonFlags,
) -> None:
    """Generate CURVE keys, with which an engine can listen on tcp://.

    The engine needs the folder; a client on another host needs its files engine.public and client.secret.
    """
    del common
    from quire.protocol.keys import generate_keys

    generate_keys(folder)
    write(f"keys written; use them with: quire engine --address tcp://0.0.0.0:5555 --curve-keys {folder}\n")
