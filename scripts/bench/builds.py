"""Builds of the engines that are compared: version, commit, build flags, threads, command lines; and the host."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from quire.frontend.version import installed_version
from quire.kernels.info import host_info

UNKNOWN = "unknown"
SECONDS = 30.0  # for a program to say its version
ROOT = Path(__file__).parents[2]

_CMAKE_FLAG = re.compile(r"^((?:GGML|LLAMA)_\w+|CMAKE_BUILD_TYPE|CMAKE_C(?:XX)?_FLAGS):\w+=(.+)$", re.MULTILINE)
_OFF = ("OFF", "0", "FALSE", "NO")
_FEATURE = re.compile(r"(\w+) = 1\b")


@dataclass(frozen=True)
class Build:
    """Build of an engine, and how it was run; `UNKNOWN` is what it does not say. `flags`: compiler, options, ISA."""

    name: str
    version: str
    commit: str
    flags: str
    threads: int
    commands: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """A line for the build, and one for each command."""
        heading = f"{self.name} {self.version}, commit {self.commit}; {self.flags}; {self.threads} threads"
        return [heading, *(f"    {command}" for command in self.commands)]


def header(builds: Iterable[Build]) -> list[str]:
    """Return the lines that say what was compared, and on which host; engines of one build share its line."""
    commands: dict[str, list[str]] = {}
    for build in builds:
        heading, *own = build.lines
        known = commands.setdefault(heading, [])
        known += [command for command in own if command not in known]
    lines = [host_line()]
    for heading, own in commands.items():
        lines += [heading, *own]
    return lines


def as_json(builds: Iterable[Build]) -> list[dict[str, Any]]:
    """Return the fields of each build."""
    return [asdict(build) for build in builds]


def host_line() -> str:
    """Return the CPU, how many of it, and the operating system."""
    host = host_info()
    cpus = f"{host['cpus']} CPUs ({host['cores']} cores)"
    return f"{host['cpu']}, {cpus}, {platform.system()} {platform.release()}, Python {platform.python_version()}"


def python_call(name: str, options: Mapping[str, Any]) -> str:
    """Return a call as Python writes it."""
    return f"{name}({', '.join(f'{name}={value!r}' for name, value in options.items())})"


def quire_build(command: str, threads: int | None = None) -> Build:
    """Return the build of Quire of this environment; `threads` is None for one on each available CPU."""
    host = host_info()
    flags = f"ISA {host['isa']}, LLVM {host['llvm_version']}"
    return Build("Quire", installed_version(), commit_of(ROOT), flags, threads or host["threads"], (command,))


def commit_of(folder: Path) -> str:
    """Return the commit that is checked out, with a mark if there are changes; `UNKNOWN` outside a repository."""
    try:
        words = ["git", "-C", str(folder), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=, changed"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return done.stdout.strip() or UNKNOWN


def llama_build(program: Path, threads: int, commands: Iterable[str], messages: str = "") -> Build:
    """Return the build of a program of llama.cpp, with the CPU features that its `messages` name."""
    said = _version(program)
    named = re.search(r"^version: (\S+)(?: \((\w+)\))?", said, re.MULTILINE)
    compiler = re.search(r"^built with (.+)$", said, re.MULTILINE)
    flags = [compiler[1] if compiler else "compiler unknown", *_cmake_flags(program)]
    if features := _features(messages):
        flags.append(f"CPU features {' '.join(features)}")
    version, commit = (named[1], named[2] or UNKNOWN) if named else (UNKNOWN, UNKNOWN)
    return Build("llama.cpp", version, commit, ", ".join(flags), threads, tuple(commands))


@cache
def _version(program: Path) -> str:
    """Return what the program says of its version, empty if it does not."""
    words = [str(program), "--version"]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{done.stdout}\n{done.stderr}"


def _cmake_flags(program: Path) -> list[str]:
    """Return the options that are on in the CMake cache of the folder in which the program was built."""
    for folder in program.resolve().parents[:3]:
        try:
            text = (folder / "CMakeCache.txt").read_text(errors="replace")
        except OSError:
            continue
        return [f"{name}={value}" for name, value in _CMAKE_FLAG.findall(text) if value.upper() not in _OFF]
    return ["build options unknown"]


def _features(messages: str) -> list[str]:
    line = next((line for line in messages.splitlines() if "system_info:" in line), "")
    return _FEATURE.findall(line.partition("|")[2])


def environment_words(environment: Mapping[str, str], names: Iterable[str]) -> str:
    """Return the variables of the environment as they are written before a command."""
    return " ".join(f"{name}={environment[name]}" for name in names if environment.get(name))


def changed_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that differ from this process's own."""
    return [name for name, value in environment.items() if os.environ.get(name) != value and name != "PATH"]
