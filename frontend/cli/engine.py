"""`quire engine`."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from quire.frontend.cli.flags import CommonFlags, EngineFlags, EngineProcessFlags, takes_flags
from quire.protocol.options import command_line


@takes_flags
def engine(*, process: EngineProcessFlags, engine: EngineFlags, common: CommonFlags) -> NoReturn:
    """Run an engine alone.

    It prints `READY <address>` once others can attach with --engine-address. SIGTERM lets running requests end first,
    Ctrl-C aborts them.
    """
    del common
    from quire.frontend.engine_args import DEMO_MODEL

    flags = command_line({"model": DEMO_MODEL, **engine.given, **process.given})
    sys.stdout.flush()
    # -P: folders in the current directory must not shadow packages
    command = [sys.executable, "-P", "-m", "quire.engine_core", *flags]
    os.execv(sys.executable, command)  # noqa: S606 - the engine takes this process over, and its signals
