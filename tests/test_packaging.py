"""The wheel contains everything that users need, and nothing of the build or the tests."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from patience import PATIENCE

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("protocol", "frontend", "engine_core", "kernels")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in the wheel, built without its native part, which would take minutes."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["-C", "wheel.cmake=false", "--wheel-dir", str(folder), str(REPOSITORY)]
    subprocess.run(command, check=True, timeout=PATIENCE)
    (wheel,) = folder.glob("quire-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_contains_every_python_file(wheel_names: set[str]) -> None:
    files = {path.relative_to(REPOSITORY) for name in PACKAGES for path in (REPOSITORY / name).rglob("*.py")}
    assert files
    assert {f"quire/{file}" for file in files} <= wheel_names
    assert {f"quire/{name}/py.typed" for name in PACKAGES} <= wheel_names


def test_the_wheel_contains_the_demo_model(wheel_names: set[str], demo_model: Path) -> None:
    assert {f"quire/frontend/demo_model/{path.name}" for path in demo_model.iterdir()} <= wheel_names


@pytest.mark.parametrize("folder", ["frontend/page", "frontend/http/documentation/docs"])
def test_the_wheel_contains_the_pages(wheel_names: set[str], folder: str) -> None:
    files = {f"quire/{folder}/{path.name}" for path in (REPOSITORY / folder).iterdir()}
    assert len(files) > 3
    assert files <= wheel_names


def test_the_wheel_contains_nothing_else(wheel_names: set[str]) -> None:
    outside = {name for name in wheel_names if not name.startswith(("quire/", "quire-"))}
    sources = {name for name in wheel_names if name.endswith((".cpp", ".h", "CMakeLists.txt", ".pyc", ".pyi", ".so"))}
    assert not outside | sources
