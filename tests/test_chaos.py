"""The short form of `scripts/robustness.py chaos`: streams of all kinds, and an engine that is hit under them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE

SCRIPT = Path(__file__).parents[1] / "scripts" / "robustness.py"


def test_no_answer_changes_when_the_engine_is_hit() -> None:
    command = [sys.executable, str(SCRIPT), "chaos", "--streams", "33", "--tokens", "600", "--rounds", "2"]
    command += ["--pause", "0.5", "1", "--most", "6", "--hits", "kill", "step", "bomb", "grammar", "oom", "segv"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^1 bombs ended with 500 the engine has died", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^1 bombs ended with 400 structured_outputs can't be used", done.stdout, re.MULTILINE), (
        done.stdout
    )
    assert re.search(r"^\d+ hits by kill", done.stdout, re.MULTILINE), done.stdout
