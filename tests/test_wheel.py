"""The wheel: it has everything that users need and nothing else, and streams a story from an empty environment."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from patience import PATIENCE

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("protocol", "frontend", "engine_core", "kernels")
MOST_BYTES = 40 << 20  # to download
ON_EVERY_SYSTEM = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libz.so.1", "ld-linux-x86-64.so.2"}
IN_THE_WHEEL = "libzstd-"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for this Python. What is compiled is that of the installation under test."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [str(REPOSITORY / "scripts" / "build_wheel"), "--out", str(folder)]
    environment = {**os.environ, "QUIRE_VENV": sys.prefix}
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    (wheel,) = folder.glob("quire-*.whl")
    return wheel


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_it_contains_every_python_file(names: set[str]) -> None:
    files = {path.relative_to(REPOSITORY) for name in PACKAGES for path in (REPOSITORY / name).rglob("*.py")}
    assert files
    assert {f"quire/{file}" for file in files} <= names
    assert {"quire/__init__.py", *(f"quire/{name}/py.typed" for name in PACKAGES)} <= names


@pytest.mark.parametrize("folder", ["frontend/demo_model", "frontend/page", "frontend/http/documentation/docs"])
def test_it_contains_the_demo_model_and_the_pages(names: set[str], folder: str) -> None:
    files = [path.relative_to(REPOSITORY) for path in (REPOSITORY / folder).rglob("*") if path.is_file()]
    assert len(files) > 3
    assert {f"quire/{file}" for file in files} <= names


def test_it_contains_nothing_else(names: set[str]) -> None:
    assert {name.split("/")[0].split("-")[0] for name in names} == {"quire", "quire.libs"}
    assert not [name for name in names if name.endswith((".cpp", ".h", "CMakeLists.txt", ".pyc"))]


def test_it_is_small_and_needs_no_library_that_some_systems_lack(wheel: Path, names: set[str], tmp_path: Path) -> None:
    assert wheel.stat().st_size < MOST_BYTES
    assert "-manylinux_2_34_" in wheel.name
    (extension,) = (name for name in names if name.startswith("quire/") and name.endswith(".so"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(extension, tmp_path)
    listed = subprocess.run(["readelf", "-d", tmp_path / extension], capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].split("]")[0] for line in listed.splitlines() if "(NEEDED)" in line}
    assert all(name in ON_EVERY_SYSTEM or name.startswith(IN_THE_WHEEL) for name in needed), needed


def test_it_streams_a_story_from_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """With the packages that it names, and neither compiler nor LLVM on PATH, nor caches."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    pip = f"{tmp_path}/venv/bin/pip"
    subprocess.run([pip, "install", "--disable-pip-version-check", "--quiet", str(wheel)], check=True)
    empty = tmp_path / "bin"
    empty.mkdir()
    environment = {"PATH": str(empty), "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    command = [f"{tmp_path}/venv/bin/quire", "serve", "Once upon a time", "--max-tokens", "20"]
    story = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert story.returncode == 0, story.stderr
    assert len(story.stdout.split()) > 10
    assert (tmp_path / ".cache" / "quire").is_dir()
