"""The type stub of the native extension describes the module that is installed."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE

from quire.kernels import _native

STUB = Path(_native.__file__).with_name("_native.pyi")
VAGUE = {"object", "dict", "list", "tuple", "Callable", "NDArray"}
"""Annotations that leave out what mypy needs; `object` may only be an operand of `__eq__`."""


def public_names(scope: type | types.ModuleType) -> set[str]:
    return {name for name in vars(scope) if not name.startswith("_")}


def stub_names(body: list[ast.stmt]) -> set[str]:
    names = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    names |= {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    names |= {
        target.id
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return {name for name in names if not name.startswith("_")}


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.fixture(scope="module")
def tree() -> ast.Module:
    return ast.parse(STUB.read_text())


def test_the_stub_has_every_public_name(tree: ast.Module) -> None:
    assert stub_names(tree.body) == public_names(_native)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for name, node in classes.items():
        assert stub_names(node.body) == public_names(getattr(_native, name)), name


def test_every_signature_is_precise(tree: ast.Module) -> None:
    for function in functions(tree):
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        annotations = [a.annotation for a in arguments if a.arg != "self"] + [function.returns]
        for annotation in annotations:
            assert annotation is not None, function.name
            if function.name != "__eq__":
                assert ast.unparse(annotation) not in VAGUE, f"{function.name}: {ast.unparse(annotation)}"


def test_signatures_have_at_most_eight_parameters(tree: ast.Module) -> None:
    """Constructors of plain structs have a keyword for each field instead."""
    for function in functions(tree):
        assert len(function.args.args) <= 9, function.name  # with self
        assert function.name == "__init__" or len(function.args.kwonlyargs) <= 8, function.name


@pytest.mark.skipif(importlib.util.find_spec("nanobind") is None, reason="nanobind, a build requirement, is missing")
def test_the_stub_is_generated_from_this_module(tmp_path: Path) -> None:
    generator = Path(importlib.util.find_spec("nanobind").origin).with_name("stubgen.py")  # type: ignore[union-attr, arg-type]
    command = [
        sys.executable,
        str(generator),
        "-q",
        "-m",
        "_native",
        "-i",
        str(STUB.parent),
        "-o",
        str(tmp_path / "new.pyi"),
    ]
    subprocess.run(command, check=True, timeout=PATIENCE)
    assert (tmp_path / "new.pyi").read_text() == STUB.read_text()
