"""JSON files of checkpoints and adapters, and other files that are read as a whole, of bounded size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from quire.kernels.errors import ModelError
from quire.kernels.regular_files import open_regular

MAX_BYTES = 100_000_000

T = TypeVar("T")


def read_bounded(path: Path, most: int = MAX_BYTES, meaning: str = "it is not the JSON file of a checkpoint") -> bytes:
    """Return the content of a file. Raises OSError, and ModelError for more than `most` bytes with what that means."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, most) + 1)
    if len(content) > most:
        raise ModelError(f"{path} has more than {most} bytes; {meaning}")
    return content


def read_json(path: Path, kind: type[T], what: str, most: int = MAX_BYTES) -> T:
    """Return the JSON in a file as `kind`. Raises ModelError."""
    problem = f"{path} can't be read as {what}"
    try:
        text = read_bounded(path, most)
    except OSError as error:
        raise ModelError(f"{problem}: {error.strerror}") from None
    return decoded(text, kind, problem)


def decoded(text: bytes | msgspec.Raw, kind: type[T], problem: str) -> T:
    """Return JSON as `kind`. Raises ModelError with a message that begins with `problem`."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (ValueError, RecursionError) as error:  # DecodeError, or UnicodeDecodeError
        raise ModelError(f"{problem}: {error}") from None
