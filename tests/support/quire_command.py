"""The command `quire`, run by the Python of the tests."""

from __future__ import annotations

import sys

PROGRAM = "from quire.frontend.cli import main; main()"


def quire_command(*arguments: object) -> list[str]:
    """Return the command line of `quire ARGUMENTS`; `-P` keeps Python from finding modules in its working directory."""
    return [sys.executable, "-P", "-c", PROGRAM, *map(str, arguments)]
