"""Atomic writing of files."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quire.frontend.whole_file import can_write_whole, write_whole


def test_a_file_is_replaced_where_a_link_points(tmp_path: Path) -> None:
    file, link = tmp_path / "a", tmp_path / "b"
    file.write_text("before")
    file.chmod(0o640)
    link.symlink_to(file)
    write_whole(link, "after")
    assert file.read_text() == "after"
    assert file.stat().st_mode & 0o777 == 0o640
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "b"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "\ud800")
    assert file.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert can_write_whole(pipe)
    writer = threading.Thread(target=write_whole, args=(pipe, "text"))
    writer.start()
    assert pipe.read_text() == "text"
    writer.join()
    assert pipe.is_fifo()


def test_standard_output_that_is_a_file_is_written_in_place(tmp_path: Path) -> None:
    code = "from pathlib import Path; from quire.frontend.whole_file import write_whole; "
    code += "write_whole(Path('/dev/stdout'), 'whole '); print('and more')"
    with (tmp_path / "a").open("w") as output:
        subprocess.run([sys.executable, "-P", "-c", code], stdout=output, check=True)
    assert (tmp_path / "a").read_text().endswith("and more\n")


def test_a_folder_and_a_file_in_a_missing_folder_cannot_be_written(tmp_path: Path) -> None:
    assert can_write_whole(tmp_path / "new")
    assert not can_write_whole(tmp_path)
    assert not can_write_whole(tmp_path / "none" / "new")
