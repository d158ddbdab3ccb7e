"""The command line, `quire`. Its commands are listed in `app`."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from quire.frontend.cli.failures import exit_status
from quire.frontend.cli.signals import end_on_signals

INTERRUPTED = 130  # 128 + SIGINT


def main() -> NoReturn:
    """Run the `quire` command and exit with its status."""
    end_on_signals()
    try:
        from quire.frontend.cli.app import run

        status = run()
    except KeyboardInterrupt:
        status = INTERRUPTED
        if sys.stderr.isatty():  # where `^C` stands
            sys.stderr.write("\n")
    except Exception as error:  # noqa: BLE001 - the outermost frame: whatever it is becomes one line
        status = exit_status(error)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone, as in `quire complete ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:  # the reader does not read
        status = INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more Ctrl-C would change the status while Python ends
    sys.exit(status)
