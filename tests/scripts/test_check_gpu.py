"""`scripts/check_gpu`, with a GPU that is emulated and without one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import emulated_gpu
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_gpu"


def check_gpu(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it, with this Python and its packages."""
    given = {"QUIRE_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(sys.path), "QUIRE_THREADS": "1"}
    return subprocess.run(
        [str(SCRIPT), *options], capture_output=True, text=True, check=False, env=os.environ | given | environment
    )


def test_it_compares_and_measures(demo_model: Path, tmp_path: Path) -> None:
    gpu = emulated_gpu.build(tmp_path)
    done = check_gpu(
        "--only", "demo f32,lfm2,fast,copy", "--steps", "1", "--seconds", "1000", "--prompts", "1,17,70", **gpu
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "GPUs   Emulated GPU"
    assert [line[7:36].strip() for line in lines if " equal (" in line] == ["demo f32", "demo fast_matmul", "lfm2-1.2b"]
    assert sum(line.startswith("speed  demo") and "GB/s" in line for line in lines) == 2
    assert [line.split()[1:5] for line in lines if "copy" in line] == [["copy", "reads", "and", "writes"]]
    assert lines[-1] == "all 3 cases that were compared are equal"


def test_what_there_is_no_time_for_is_left_out(tmp_path: Path) -> None:
    done = check_gpu("--seconds", "-1", **emulated_gpu.build(tmp_path))
    assert done.returncode == 1
    assert done.stdout.count("left out: no time is left") == 25
    assert done.stdout.endswith("nothing was compared\n")


def test_peers_without_a_gpu_are_left_out(tmp_path: Path) -> None:
    done = check_gpu("--only", "torch,transformers", **emulated_gpu.build(tmp_path))
    assert (done.returncode, done.stderr) == (1, "")
    lines = [line for line in done.stdout.splitlines() if " left out: torch " in line]
    assert [line.split()[1] for line in lines] == ["torch._int_mm", "transformers"]
    assert done.stdout.endswith("nothing was compared\n")


def test_a_case_that_fails_is_told(tmp_path: Path) -> None:
    done = check_gpu("--only", "demo bf16", "--no-speed", "--device", "cuda:7", **emulated_gpu.build(tmp_path))
    assert done.returncode == 1
    assert "failed: device cuda:7 can't be used: there is no GPU number 7" in done.stdout
    assert done.stdout.endswith("2 of 2 cases differ or failed\n")


def test_a_case_that_lacks_memory_is_told(tmp_path: Path) -> None:
    gpu = emulated_gpu.build(tmp_path) | {"QUIRE_EMULATED_ALLOCATION": "2"}
    done = check_gpu("--only", "demo f32", **gpu)
    assert (done.returncode, done.stderr) == (1, "")
    assert [line[:6].strip() for line in done.stdout.splitlines() if " failed: " in line] == ["bits", "speed"]
    assert done.stdout.endswith("2 of 2 cases differ or failed\n")


@pytest.mark.parametrize(
    ("compiler", "seconds", "end"),
    [("sleep 1000 #", "8", "time ran out"), ("kill -9 $PPID #", "100", "the process ended with status -9")],
    ids=["hangs", "crashes"],
)
def test_a_summary_is_printed_whatever_happens(compiler: str, seconds: str, end: str, tmp_path: Path) -> None:
    """Of a kernel that is compiled for ever, or takes the process with it."""
    (kept := tmp_path / "kept").mkdir()
    gpu = emulated_gpu.build(tmp_path) | {"QUIRE_PTX_TO_SO": compiler, "QUIRE_PTX_FOLDER": str(kept)}
    begun = time.monotonic()
    done = check_gpu("--only", "demo f32", "--seconds", seconds, XDG_CACHE_HOME=str(tmp_path), **gpu)
    assert done.returncode == 1
    assert done.stdout.endswith(f"nothing was compared; {end} in bits of demo f32\n")
    assert time.monotonic() - begun < 60


def test_a_machine_without_a_gpu_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    done = check_gpu(LD_LIBRARY_PATH=str(tmp_path))
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (2, 1, "")
    assert done.stdout.startswith("there is no GPU to check: libcuda.so.1")
