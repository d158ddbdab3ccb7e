"""`scripts/robustness.py` runs each module of its folder by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import robustness
from patience import PATIENCE


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script."""
    command = [sys.executable, robustness.__file__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_every_module_has_a_line_in_the_help() -> None:
    shown = run_script("--help").stdout
    modules = {path.stem for path in Path(robustness.__file__).with_suffix("").glob("*.py")}
    assert modules == robustness.COMMANDS.keys()
    assert all(f"  {name} " in shown and line in shown for name, line in robustness.COMMANDS.items())


def test_a_command_gets_the_arguments_after_its_name() -> None:
    assert "usage: robustness.py faults [-h] [--seeds N]" in run_script("faults", "--help").stdout
    done = run_script("faults", "--seeds", "2", "--first", "7")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 seeds, 0 failed")


def test_an_unknown_name_is_an_error_that_lists_the_names() -> None:
    done = run_script("chaoss")
    assert done.returncode == 2
    assert "invalid choice: 'chaoss' (choose from" in done.stderr
