"""The wheel: it has everything that users need and nothing else, and streams a story from an empty environment."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from patience import PATIENCE

REPOSITORY = Path(__file__).parents[1]
NAME = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["name"].replace("-", "_")
PACKAGES = ("protocol", "frontend", "engine_core", "kernels")
MOST_BYTES = 40 << 20  # to download
ON_EVERY_SYSTEM = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libz.so.1"}
LOADER = "ld-linux-"
IN_THE_WHEEL = "libzstd-"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for this Python. What is compiled is that of the installation under test."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [str(REPOSITORY / "scripts" / "build_wheel"), "--out", str(folder)]
    environment = {**os.environ, "QUIRE_VENV": sys.prefix}
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    (wheel,) = folder.glob(f"{NAME}-*.whl")
    return wheel


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_it_contains_every_python_file(names: set[str]) -> None:
    files = {path.relative_to(REPOSITORY) for name in PACKAGES for path in (REPOSITORY / name).rglob("*.py")}
    assert files
    assert {f"quire/{file}" for file in files} <= names
    assert {"quire/__init__.py", "quire/lora/request.py", *(f"quire/{name}/py.typed" for name in PACKAGES)} <= names


@pytest.mark.parametrize("folder", ["frontend/demo_model", "frontend/page", "frontend/http/documentation/docs"])
def test_it_contains_the_demo_model_and_the_pages(names: set[str], folder: str) -> None:
    files = [path.relative_to(REPOSITORY) for path in (REPOSITORY / folder).rglob("*") if path.is_file()]
    assert len(files) > 3
    assert {f"quire/{file}" for file in files} <= names


def test_it_contains_nothing_else(names: set[str]) -> None:
    assert {name.split("/")[0].split("-")[0] for name in names} == {"quire", NAME, f"{NAME}.libs"}
    assert not [name for name in names if name.endswith((".cpp", ".h", "CMakeLists.txt", ".pyc"))]


def test_it_is_small_and_needs_no_library_that_some_systems_lack(wheel: Path, names: set[str], tmp_path: Path) -> None:
    assert wheel.stat().st_size < MOST_BYTES
    assert "-manylinux_2_34_" in wheel.name
    (extension,) = (name for name in names if name.startswith("quire/") and name.endswith(".so"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(extension, tmp_path)
    listed = subprocess.run(["readelf", "-d", tmp_path / extension], capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].split("]")[0] for line in listed.splitlines() if "(NEEDED)" in line}
    assert all(name in ON_EVERY_SYSTEM or name.startswith((LOADER, IN_THE_WHEEL)) for name in needed), needed


def test_serve_installs_it_and_streams_a_story_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    """`scripts/serve` builds nothing; then the command works with neither compiler nor LLVM on PATH, nor caches."""
    command = ["serve", "Once upon a time", "--max-tokens", "20", "--seed", "1"]
    environment = {"HOME": str(tmp_path), "LANG": "C.UTF-8"}
    installing = {**environment, "PATH": os.environ["PATH"], "QUIRE_WHEEL": str(wheel), "QUIRE_PYTHON": sys.executable}
    installing["QUIRE_VENV"] = str(tmp_path / "venv")
    story = stream([str(REPOSITORY / "scripts" / "serve"), *command[1:]], tmp_path, installing)
    assert "building" not in story.stderr
    (tmp_path / "bin").mkdir()
    again = stream(
        [f"{tmp_path}/venv-wheel/bin/quire", *command], tmp_path, {**environment, "PATH": str(tmp_path / "bin")}
    )
    assert again.stdout == story.stdout
    assert (tmp_path / ".cache" / "quire").is_dir()


def stream(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Return what a command printed that streams a story."""
    story = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert story.returncode == 0, story.stderr
    assert len(story.stdout.split()) > 10
    return story
