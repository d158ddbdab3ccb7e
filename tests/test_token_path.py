"""The path of a token that a manual describes is that of the code: its functions exist where it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
ROW = re.compile(r"^\| \w* ?\| `(?P<file>[\w/]+\.(py|cpp))` \| `(?P<name>[\w.:]+)` \| \w", re.MULTILINE)


def steps() -> list[tuple[str, str]]:
    text = (REPOSITORY / "engine_core" / "README.md").read_text()
    section = text.split("## One token through the code", 1)[1].split("\n## ", 1)[0]
    rows = [(match["file"], match["name"]) for match in ROW.finditer(section)]
    assert len(rows) == section.count("\n| ") - 1  # all but the header
    return rows


def defined(file: str, name: str) -> bool:
    """Return True if a file defines a method."""
    text = (REPOSITORY / file).read_text()
    if file.endswith(".cpp"):
        return re.search(rf"^\w.* {re.escape(name)}\(", text, re.MULTILINE) is not None
    owner, method = name.split(".")
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef) and node.name == owner]
    functions = [
        node for each in classes for node in each.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return method in {node.name for node in functions}


@pytest.mark.parametrize(("file", "name"), steps())
def test_function_is_there(file: str, name: str) -> None:
    assert defined(file, name), f"{file} has no {name}; engine_core/README.md says that a token comes through it"
