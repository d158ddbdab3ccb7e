"""Secrets on the command line, which every user of the machine can read in the list of processes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

_SECRETS = (b"--api-key", b"--ssl-keyfile-password")
_FIRST_FIELD = 3  # of /proc/self/stat after the command's name
_START, _END = 48 - _FIRST_FIELD, 49 - _FIRST_FIELD  # of the arguments in memory, see proc(5)


def hide_secrets() -> None:
    """Overwrite secrets in the memory that the kernel shows as this process's arguments; Python has its own copy."""
    with suppress(OSError, IndexError):  # there is no /proc, or an emulator's, which has fewer fields
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        start, end = int(fields[_START]), int(fields[_END])
        for place, length in secrets_in(ctypes.string_at(start, end - start).split(b"\0")):
            ctypes.memset(start + place, ord("*"), length)


def secrets_in(arguments: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Yield place and length of each secret in the arguments, which are separated by a byte."""
    place, follows = 0, False
    for argument in arguments:
        flag, _, value = argument.partition(b"=")
        flag = flag.replace(b"_", b"-")  # which is the same flag
        if follows:
            yield place, len(argument)
        elif value and flag in _SECRETS:
            yield place + len(argument) - len(value), len(value)
        follows = b"=" not in argument and flag in _SECRETS
        place += len(argument) + 1
