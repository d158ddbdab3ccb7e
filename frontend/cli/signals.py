"""Signals that end the command line: each unwinds the stack, so that everything is cleaned up."""

from __future__ import annotations

import signal
from types import FrameType


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP raise SystemExit with 128 + the signal's number; SIGINT raises KeyboardInterrupt."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # not under nohup
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    del frame
    signal.signal(number, signal.SIG_IGN)  # once is enough
    raise SystemExit(128 + number)
