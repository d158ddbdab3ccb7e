"""`quire engine`, and `quire keys` for its clients."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from quire.frontend.cli.flags import EngineFlags, EngineProcessFlags, takes_flags
from quire.frontend.cli.output import write
from quire.protocol.options import command_line


@takes_flags
def engine(*, process: EngineProcessFlags, engine: EngineFlags) -> NoReturn:
    """Run an engine without a frontend.

    It prints `READY <address>` once others can attach with --engine-address. SIGTERM lets running requests finish,
    Ctrl-C aborts them.
    """
    from quire.frontend.engine_args import DEMO_MODEL

    flags = command_line({"model": DEMO_MODEL, **engine.given, **process.given})
    sys.stdout.flush()
    # -P: folders in the current directory must not shadow packages.
    command = [sys.executable, "-P", "-m", "quire.engine_core", *flags]
    os.execv(sys.executable, command)  # noqa: S606 - the engine replaces this process, and gets its signals


@takes_flags
def keys(folder: Annotated[Path, typer.Argument(help="Folder for the keys; created if it does not exist.")]) -> None:
    """Generate CURVE keys, with which an engine can listen on tcp://.

    The engine needs the folder. A client on another host needs its file engine.public, and client.secret, or
    admin.secret if it may also use what concerns other clients: traces, the prefix cache, shutdown.
    """
    from quire.protocol.keys import generate_keys

    generate_keys(folder)
    write(f"keys written; use them with: quire engine --engine-address tcp://0.0.0.0:5555 --curve-keys {folder}\n")
