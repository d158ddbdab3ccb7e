"""The packages import each other only as the table allows, and each is typed."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
MAY_IMPORT = {
    "protocol": set(),
    "frontend": {"protocol"},
    "engine_core": {"protocol", "kernels"},
    "kernels": set(),
}
OPTIONAL = {  # imported only when what their extras are for is asked for
    "frontend/metrics/tracing.py": {"opentelemetry"},
    "frontend/evaluation/simulation/comparison.py": {"matplotlib"},
}
NEVER = {"torch", "transformers", "pickle", "cloudpickle"}  # not for serving; and nothing is ever unpickled


def imported_modules(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every import, however deep; `package` resolves relative ones."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from quire import kernels` names the package only among the names
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def forbidden_imports(source: str, file: Path) -> list[str]:
    """What a file of a package imports against the table; `file` is relative to the repository."""
    top = file.parts[0]
    package = ".".join(("quire", *file.parts[:-1]))
    problems = []
    for line, module in imported_modules(source, package):
        parts = module.split(".")
        inside = parts[1] if parts[0] == "quire" and len(parts) > 1 else None
        if inside is not None and inside != top and inside not in MAY_IMPORT[top]:
            problems.append(f"{file}:{line} imports {module}")
        # The folders are packages of `quire`; by their bare names they are importable only by accident.
        if parts[0] in MAY_IMPORT or parts[0] in NEVER:
            problems.append(f"{file}:{line} imports {module}")
    return problems


def python_files(top: str) -> list[Path]:
    """The Python files of a package, relative to the repository."""
    return sorted(path.relative_to(REPOSITORY) for path in (REPOSITORY / top).rglob("*.py"))


@pytest.mark.parametrize("top", MAY_IMPORT)
def test_imports_follow_the_table(top: str) -> None:
    files = python_files(top)
    assert files
    problems = [line for file in files for line in forbidden_imports((REPOSITORY / file).read_text(), file)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("top", MAY_IMPORT)
def test_every_package_is_typed(top: str) -> None:
    assert (REPOSITORY / top / "py.typed").exists()
    assert (REPOSITORY / top / "__init__.py").exists()
    assert not (REPOSITORY / "__init__.py").exists()


@pytest.mark.parametrize("top", MAY_IMPORT)
def test_every_third_party_import_is_declared(top: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[^\w-]", line)[0] for line in project["dependencies"]}
    always = names - {"pyzmq", "prometheus-client"} | {"zmq", "prometheus_client"}
    for file in python_files(top):
        import_names = always | OPTIONAL.get(file.as_posix(), set())
        for line, module in imported_modules((REPOSITORY / file).read_text(), "quire"):
            root = module.split(".")[0]
            if root != "quire" and root not in sys.stdlib_module_names:
                assert root in import_names, f"{file}:{line} imports {root}, which pyproject.toml does not name"


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("frontend/x.py", "from quire.engine_core.engine import EngineCore"),
        ("frontend/cli/x.py", "def f():\n    import quire.kernels.runner as runner"),
        ("frontend/cli/x.py", "from quire import engine_core"),
        ("frontend/cli/x.py", "from ...engine_core import engine"),
        ("protocol/x.py", "from ..frontend import llm"),
        ("kernels/models/x.py", "if TYPE_CHECKING:\n    from quire.protocol.messages import Ready"),
        ("engine_core/x.py", "from frontend.llm import LLM"),
        ("engine_core/x.py", "import pickle"),
    ],
)
def test_a_forbidden_import_is_found(file: str, source: str) -> None:
    assert forbidden_imports(source, Path(file))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("frontend/x.py", "from quire.protocol.messages import Ready\nfrom quire.frontend.llm import LLM"),
        ("engine_core/x.py", "import quire.kernels.runner\nfrom quire import protocol"),
        ("kernels/models/x.py", "from ..emit import gemm\nimport numpy as np"),
    ],
)
def test_an_allowed_import_passes(file: str, source: str) -> None:
    assert not forbidden_imports(source, Path(file))
