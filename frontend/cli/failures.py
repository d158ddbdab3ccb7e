"""Errors as the command line shows them."""

from __future__ import annotations

import os
import sys
import traceback

from quire.protocol.memory_limit import explain_failure

DEBUG = "QUIRE_DEBUG"

# Errors with a message for users; any other error is a bug.
EXPECTED = (ValueError, RuntimeError, OSError)


def exit_status(error: Exception) -> int:
    """Print `error` as one line on stderr (after a traceback with --debug); return the exit status."""
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    usage = getattr(error, "format_message", None)  # typer's usage errors, from whichever package it takes them
    if usage is not None:
        command = getattr(getattr(error, "ctx", None), "command_path", "quire")
        fail(f"{usage().rstrip('.')}; see {command} --help")
        return 2
    if isinstance(error, BrokenPipeError):
        return 1
    if isinstance(error, MemoryError | ImportError | SyntaxError | SystemError) and (words := explain_failure(error)):
        fail(words)
    elif isinstance(error, EXPECTED):
        fail(str(error) or type(error).__name__)
    else:
        fail(f"unexpected {type(error).__name__}: {error}; --debug shows the traceback")
    return 1


def fail(message: str) -> None:
    """Print an error message on stderr."""
    sys.stderr.write(f"quire: {message}\n")
    sys.stderr.flush()
