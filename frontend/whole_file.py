"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def can_write_whole(path: Path) -> bool:
    """Whether `write_whole` may write there, as far as can be told without trying."""
    return not path.is_dir() and os.access(path.resolve().parent if _is_replaced(path) else path, os.W_OK)


def write_whole(path: Path, text: str) -> None:
    """Write a file; one that is there is replaced at once or not at all. Raises OSError.

    A pipe or a device, such as /dev/stdout, is written to.
    """
    if not _is_replaced(path):
        path.write_text(text, encoding="utf-8")
        return
    target = path.resolve()
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _is_replaced(path: Path) -> bool:
    return path.is_file() or not path.exists()
