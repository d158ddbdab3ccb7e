"""Files that are written whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from quire.frontend.report.whole_file import write_whole


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    for text in ("old, and longer", "new"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_stays_as_it_was_when_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    write_whole(path, "old")
    write = Path.write_text

    def fill(file: Path, text: str, encoding: str) -> int:
        write(file, text[:1], encoding=encoding)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path: Path) -> None:
    path, link, pipe = tmp_path / "page.html", tmp_path / "latest.html", tmp_path / "pipe"
    path.write_text("old")
    link.symlink_to(path)
    write_whole(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "new")
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
