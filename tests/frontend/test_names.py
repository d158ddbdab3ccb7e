"""The public names of the frontend."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import quire
import quire.frontend
from quire.frontend.version import installed_version

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
PROJECT_SCRIPT = f"quire = {PROJECT['scripts']['quire']}"


def test_every_public_name_is_there() -> None:
    for name in quire.frontend.__all__:
        assert hasattr(quire.frontend, name), name
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = quire.frontend.Llm


def test_every_name_is_in_the_package_itself() -> None:
    package: Any = quire
    assert package.__all__ == quire.frontend.__all__
    for name in quire.frontend.__all__:
        assert getattr(quire, name) is getattr(quire.frontend, name), name
    assert quire.__version__ == PROJECT["version"]
    with pytest.raises(AttributeError, match="module 'quire' has no attribute 'Llm'"):
        _ = quire.Llm


def test_an_engine_process_imports_nothing_of_the_frontend() -> None:
    program = "import sys, quire.engine_core.arguments; print(*(name for name in sys.modules if 'frontend' in name))"
    found = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


@pytest.mark.parametrize("name", ["quire", "quire_engine"])
def test_the_version_is_that_of_the_distribution_with_the_command_whatever_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another project on the Python package index is called `quire`, and has a command of that name."""
    scripts = {"aaa_quire": "quire = quire.main:run", name: PROJECT_SCRIPT}
    for version, (distribution, script) in enumerate(scripts.items(), start=41):
        folder = tmp_path / f"{distribution}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (folder / "entry_points.txt").write_text(f"[console_scripts]\n{script}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert inspect.unwrap(installed_version)() == "42"


def test_without_a_distribution_the_version_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert inspect.unwrap(installed_version)() == "unknown (not installed)"
