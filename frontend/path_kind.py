"""Names of what is at a path, for errors about paths that users give."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFREG: "is a file", stat.S_IFDIR: "is a folder", stat.S_IFIFO: "is a pipe", stat.S_IFSOCK: "is a socket",
    stat.S_IFCHR: "is a device", stat.S_IFBLK: "is a device",
}  # fmt: skip


NOWHERE = "does not exist"
"""What is at a path where nothing is."""


def what_is(path: str | os.PathLike[str]) -> str:
    """Return what is at a path once links are followed, such as "is a pipe" or "does not exist"."""
    try:
        return _KINDS[stat.S_IFMT(Path(path).stat().st_mode)]
    except FileNotFoundError:
        return NOWHERE
    except (OSError, ValueError) as error:
        return f"cannot be looked at ({error})"
