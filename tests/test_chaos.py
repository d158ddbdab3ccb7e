"""The short form of `scripts/robustness.py chaos`: streams of all kinds, and engines that are hit under them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE

SCRIPT = Path(__file__).parents[1] / "scripts" / "robustness.py"


def chaos(*flags: str) -> str:
    """Run it and return its report."""
    command = [sys.executable, str(SCRIPT), "chaos", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_answer_changes_when_the_engine_is_hit() -> None:
    hits = ("kill", "step", "bomb", "grammar", "oom", "segv")
    report = chaos(
        *("--streams", "42", "--tokens", "600", "--rounds", "2", "--pause", "0.5", "1", "--most", "6", "--hits", *hits)
    )
    assert re.search(r"^1 bombs ended with 500 the engine has died", report, re.MULTILINE), report
    assert re.search(r"^1 bombs ended with 400 structured_outputs can't be used", report, re.MULTILINE), report
    assert re.search(r"^\d+ hits by kill", report, re.MULTILINE), report


def test_no_answer_changes_when_engines_of_a_set_are_hit_and_leave() -> None:
    report = chaos(
        *("--engines", "2", "--streams", "28", "--tokens", "500", "--rounds", "2", "--pause", "0.2", "0.5"),
        *("--most", "6", "--hits", "kill", "drain", "--speculative-config", '{"method": "suffix"}'),
    )
    assert re.search(r"^\d+ hits by kill", report, re.MULTILINE), report
    assert re.search(r"^\d+ hits by drain", report, re.MULTILINE), report
