"""The short form of `scripts/chaos.py`: streams of all kinds, and an engine that is hit under them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE

SCRIPT = Path(__file__).parents[1] / "scripts" / "chaos.py"


def test_no_answer_changes_when_the_engine_is_hit() -> None:
    command = [sys.executable, str(SCRIPT), "--streams", "33", "--tokens", "600", "--rounds", "2"]
    command += ["--pause", "1", "2", "--most", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    hits = re.search(r"^(\d+) hits", done.stdout, re.MULTILINE)
    assert hits is not None
    assert int(hits[1]) >= 1
