"""Files of a model, which must be regular ones: opening a pipe or a device may wait for ever, or do something."""

from __future__ import annotations

import errno
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError, also for what is no regular file once links are followed."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except ValueError as error:  # a null character
        raise OSError(errno.EINVAL, f"no file can have this path ({error})", str(path)) from None
    if kind != stat.S_IFREG:
        found = _KINDS.get(kind, "something else")
        raise OSError(errno.EINVAL, f"it is {found}, and the files of a model must be regular ones", str(path))
    return path.open("rb")
