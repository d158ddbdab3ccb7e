"""An installation without what measures and simulates: all else works, and what needs it says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from quire_command import PROGRAM

# Runs in every process, as its `sitecustomize`.
_HIDES = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("quire.frontend.evaluation", "quire.engine_core.simulation")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sitecustomize.py").write_text(_HIDES)
    paths = (str(tmp_path), os.environ.get("PYTHONPATH"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run(code: str, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_an_engine_answers(environment: dict[str, str]) -> None:
    ended = run(PROGRAM, environment, "complete", "Once upon a time", "--max-tokens", "4")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip()


def test_all_else_can_be_imported(environment: dict[str, str]) -> None:
    code = (
        "import quire.frontend.cli.app, quire.frontend.http.server, quire.engine_core.process\n"
        "from quire.frontend import LLM, AsyncLLM"
    )
    ended = run(code, environment)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("bench latency", ()),
        ("bench throughput", ()),
        ("bench serve", ()),
        ("bench sweep", ()),
        ("replay", ("trace.jsonl",)),
        ("simulate", ("--trace", "trace.jsonl", "--calibration", "calibration.json")),
        ("calibrate", ("--output", "calibration.json")),
    ],
)
def test_what_measures_says_that_it_is_not_installed(
    command: str, arguments: tuple[str, ...], environment: dict[str, str]
) -> None:
    ended = run(PROGRAM, environment, *command.split(), *arguments)
    assert ended.returncode == 1
    [error] = ended.stderr.splitlines()
    assert error.startswith(f"quire: `quire {command}` is not installed: this installation was made without")


def test_a_server_that_should_record_says_that_it_cannot(environment: dict[str, str], tmp_path: Path) -> None:
    ended = run(PROGRAM, environment, "serve", "--port", "0", "--record", str(tmp_path / "trace.jsonl"))
    assert ended.returncode == 1
    assert "quire: --record is not installed" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_help_is_there(environment: dict[str, str]) -> None:
    ended = run(PROGRAM, environment, "bench", "latency", "--help")
    assert ended.returncode == 0
    assert "--input-len" in ended.stdout
