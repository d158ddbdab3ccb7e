"""The command line: `quire serve`, `engine`, `chat`, `complete`, `info`, `keys` and `version`."""

from __future__ import annotations

from quire.frontend.cli.app import main

__all__ = ["main"]
