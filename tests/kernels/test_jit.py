"""The JIT's object cache: shared by processes, and verified before use."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from quire.kernels._native import Jit
from quire.kernels.devices.instruction_sets import INSTRUCTION_SETS, available_isas
from quire.kernels.options import LoadOptions
from quire.kernels.runner import load_model

LEAST = INSTRUCTION_SETS[available_isas()[-1]]
SOURCE = """
func.func @answer(%x: i64) -> i64 {
  %c = arith.constant 42 : i64
  %y = arith.addi %x, %c : i64
  return %y : i64
}
"""


def make(cache: Path | str) -> Jit:
    return Jit(LEAST.cpu, LEAST.features, LEAST.vector_bits, str(cache))


def call(jit: Jit) -> int:
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(jit.compile(SOURCE, ["answer"])[0])
    return int(function(8))


def test_second_start_compiles_nothing(tmp_path: Path) -> None:
    first, second = make(tmp_path), make(tmp_path)
    assert (call(first), first.cache.compiled, first.cache.hits) == (50, 1, 0)
    assert (call(second), second.cache.compiled, second.cache.hits) == (50, 0, 1)


def test_another_target_is_another_entry(tmp_path: Path) -> None:
    call(make(tmp_path))
    other = Jit(LEAST.cpu, LEAST.features, 2 * LEAST.vector_bits, str(tmp_path))
    other.compile(SOURCE, ["answer"])
    assert other.cache.compiled == 1
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:-1] + bytes([b[-1] ^ 1])])
def test_damaged_entry_is_rebuilt(tmp_path: Path, damage: object) -> None:
    assert callable(damage)
    call(make(tmp_path))
    (entry,) = tmp_path.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    jit = make(tmp_path)
    assert (call(jit), jit.cache.compiled) == (50, 1)
    assert entry.read_bytes() == whole
    (words,) = jit.cache.rejected
    assert str(entry) in words


def test_an_entry_under_the_name_of_another_is_rebuilt(tmp_path: Path) -> None:
    """Both define the same symbol, so the wrong code would run."""
    other = SOURCE.replace("42", "43")
    jit = make(tmp_path)
    jit.compile(SOURCE, ["answer"])
    (first,) = tmp_path.iterdir()
    jit.compile(other, ["answer"])
    (second,) = set(tmp_path.iterdir()) - {first}
    first.replace(tmp_path / "swapped")
    second.replace(first)
    (tmp_path / "swapped").replace(second)
    jit = make(tmp_path)
    assert (call(jit), jit.cache.compiled) == (50, 1)
    assert jit.cache.rejected == [f"{first} is the entry of another kernel"]
    jit = make(tmp_path)
    assert (call(jit), jit.cache.hits, jit.cache.rejected) == (50, 1, [])


def test_a_folder_in_the_place_of_an_entry_is_no_error(tmp_path: Path) -> None:
    call(make(tmp_path))
    (entry,) = tmp_path.iterdir()
    entry.unlink()
    entry.mkdir()
    assert call(make(tmp_path)) == 50


def test_a_damaged_cache_is_logged_and_the_engine_starts(
    demo_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = LoadOptions(str(demo_model), num_pages=8, threads=1, cache_dir=str(tmp_path))
    load_model(chosen)
    entries = sorted(tmp_path.iterdir())
    contents = [entry.read_bytes() for entry in entries]
    for entry, content in zip(entries, contents[1:] + contents[:1], strict=True):
        entry.write_bytes(content)
    load_model(chosen)
    assert len(caplog.records) == len(entries)
    assert f"kernel cache: {entries[0]} is the entry of another kernel; compiled again" in caplog.text
    assert [entry.read_bytes() for entry in entries] == contents


def test_processes_may_write_concurrently(tmp_path: Path) -> None:
    script = (
        "import sys; from quire.kernels._native import Jit\n"
        f"source = {SOURCE!r}\n"
        "sys.stdin.readline()\n"
        f"jit = Jit({LEAST.cpu!r}, {LEAST.features!r}, {LEAST.vector_bits}, sys.argv[1])\n"
        "assert jit.compile(source, ['answer'])[0]\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    writers = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(4)]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    assert len(list(tmp_path.iterdir())) == 1, "private files of writers are left"
    jit = make(tmp_path)
    assert (call(jit), jit.cache.hits) == (50, 1)


def test_a_folder_that_is_not_writable_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert call(make(tmp_path / "file" / "below")) == 50


def test_diagnostics_quote_the_cause() -> None:
    with pytest.raises(RuntimeError, match=r"failed to parse.*nonsense"):
        make("").compile("func.func @f() { nonsense }", ["f"])
