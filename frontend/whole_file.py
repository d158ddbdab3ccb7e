"""Atomic writing of files: whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def can_write_whole(path: Path) -> bool:
    """Return True if `write_whole` can probably write there, as far as can be known without trying."""
    return not path.is_dir() and os.access(path if path.exists() else path.resolve().parent, os.W_OK)


def write_whole(path: Path, text: str) -> None:
    """Write a file; an existing one is replaced atomically, and keeps its mode. Raises OSError.

    A pipe or device, such as /dev/stdout, is written in place, and so is a file in a folder that is not writable.
    """
    if not _is_replaced(path):
        path.write_text(text, encoding="utf-8")
        return
    target = path.resolve()
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        draft.write_text(text, encoding="utf-8")
        if target.exists():
            shutil.copymode(target, draft)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _is_replaced(path: Path) -> bool:
    if path.is_relative_to("/dev") or path.is_relative_to("/proc"):  # /dev/stdout may be an open file
        return False
    is_ours = not path.exists() or (path.is_file() and os.access(path, os.W_OK))
    return is_ours and os.access(path.resolve().parent, os.W_OK)
