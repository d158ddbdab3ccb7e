"""The command line, `quire`. Its commands are listed in `app`."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from types import FrameType
from typing import NoReturn

from quire.frontend.cli.failures import exit_status
from quire.frontend.cli.secret_flags import hide_secrets
from quire.frontend.cli.standard_streams import open_standard_streams

INTERRUPTED = 130  # 128 + SIGINT


def main() -> NoReturn:
    """Run the `quire` command and exit with its status."""
    open_standard_streams()
    hide_secrets()
    end_on_signals()
    warnings.formatwarning = _warning_line
    try:
        from quire.frontend.cli.app import run

        status = run()
    except KeyboardInterrupt:
        status = INTERRUPTED
        if sys.stderr.isatty():  # which shows `^C`
            sys.stderr.write("\n")
    except Exception as error:  # noqa: BLE001 - the outermost frame: whatever it is becomes one line
        status = exit_status(error)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has exited, as in `quire complete ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:  # the reader blocks
        status = INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C would change the status while Python exits
    sys.exit(status)


def _warning_line(message: Warning | str, *_rest: object, **_options: object) -> str:
    return f"quire: {message}\n"


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP raise SystemExit with 128 + their number, so that the stack unwinds and cleans up."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # not under nohup
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    del frame
    signal.signal(number, signal.SIG_IGN)  # once only
    raise SystemExit(128 + number)
