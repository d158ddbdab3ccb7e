"""Errors as the command line shows them."""

from __future__ import annotations

import os
import sys
import traceback

DEBUG = "QUIRE_DEBUG"

# What the packages raise with a message for users; anything else is a defect of ours.
EXPECTED = (ValueError, RuntimeError, OSError)


def exit_status(error: Exception) -> int:
    """Print `error` as one line on stderr (a traceback as well with --debug); return the status to exit with."""
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    usage = getattr(error, "format_message", None)  # typer's errors of usage, whichever package it has them from
    if usage is not None:
        command = getattr(getattr(error, "ctx", None), "command_path", "quire")
        if message := usage():  # none if help was shown because there were no arguments
            fail(f"{message.rstrip('.')}; see {command} --help")
        return 2
    if isinstance(error, BrokenPipeError):
        return 1
    if isinstance(error, EXPECTED):
        fail(str(error) or type(error).__name__)
    else:
        fail(f"unexpected {type(error).__name__}: {error}; with --debug the traceback is shown")
    return 1


def fail(message: str) -> None:
    """Say on stderr what went wrong."""
    sys.stderr.write(f"quire: {message}\n")
    sys.stderr.flush()
