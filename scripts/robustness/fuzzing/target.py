"""Interface of the targets, and the files that they write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

from fuzzing.mutation import mutated

LONGEST_MESSAGE = 2000


class Target(Protocol):
    """Code under test. An input is a byte string of a form of the target's own."""

    @property
    def words(self) -> tuple[str, ...]:
        """Words for the fuzzer's dictionary: the keywords and separators of which inputs are made."""

    def seeds(self) -> Iterator[bytes]:
        """Return valid inputs to start from."""

    def test(self, data: bytes) -> None:
        """Run the code on an input. Raises whatever the code may not raise, and AssertionError for a wrong result."""

    def mutate(self, data: bytes, random: Random) -> bytes:
        """Return a copy of which one value differs, whatever its encoding. Raises ValueError if that is impossible."""


@dataclass(frozen=True)
class Setup:
    """A target by its name: `make` returns it, given an empty folder in memory for its files."""

    make: Callable[[Path], Target]
    max_bytes: int
    max_seconds: int = 20  # limit for one input, under instrumentation, next to other processes
    num_mutants: int = 300  # mutants that the tests try, without coverage guidance


def check_message(message: str) -> None:
    """Raise AssertionError unless an error's message is one line of bounded length."""
    if not message.isprintable():
        raise AssertionError("the error is not one line")
    if len(message) > LONGEST_MESSAGE:
        raise AssertionError("the error has no bounds")


def mutate_json(text: bytes, random: Random) -> bytes:
    """Return a JSON text of which one value differs."""
    return json.dumps(mutated(json.loads(text), random)).encode()


def replace(path: Path, content: bytes | None) -> None:
    """Write a file; None removes it."""
    if content is None:
        with suppress(FileNotFoundError):
            path.unlink()
    else:
        path.write_bytes(content)
