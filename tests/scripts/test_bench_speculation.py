"""Benchmark of speculative decoding: the same requests with and without it, some of them seen before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_speculation.py"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_what_was_seen_before_is_drafted() -> None:
    config = '{"method": "suffix", "adaptive": false}'
    small = ["--gen", "40", "--turns", "2", "--least-requests", "2", "--speculative-config", config]
    done = bench("--streams", "1,4", "--predictable", "0.5", *small)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if "1: suffix" in line]
    assert [line[0] for line in lines] == ["1", "4"]
    drafted, accepted = (int(each.replace(",", "")) for each in lines[1][-2:])
    assert drafted >= accepted > 2 * 2 * 20
    assert sum(line.split()[1:2] == ["off"] for line in done.stdout.splitlines()[1:]) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--predictable", "1.5"], "--predictable 1.5 is no share; give 0 to 1"),
        (["--gen", "0"], "--gen 0 is too small"),
        (["--speculative-config", '{"method": "luck"}'], "method is 'luck'; it must be one of"),
    ],
)
def test_errors_are_reported_in_one_line(arguments: list[str], message: str) -> None:
    done = bench(*arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
