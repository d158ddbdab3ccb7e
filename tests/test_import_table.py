"""Packages import each other as the table allows, their parts only lower layers, and no modules import in a cycle."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
MAY_IMPORT = {
    "protocol": set(),
    "frontend": {"protocol"},
    "engine_core": {"protocol", "kernels"},
    "kernels": set(),
}

# The layers of a package, the lowest first: modules, folders, `folder.module` for a module that lies lower or higher
# than its folder, and `*` for all others. A part may import lower layers and itself, but no other part of its layer.
# Imports under `TYPE_CHECKING` and in functions count.
LAYERS = {
    "protocol": "errors pooling_info totals < engine_shape < * < address messages"
    " < codec keys kv_events pipe pooling_tasks routing simulation < engine_options < sockets",
    "kernels": "activations attention_heads cgroups errors regular_files < config < rope < emit graph < host"
    " < devices gguf < weights.json_files weights.tensor"
    " < weights.expert_tensors weights.safetensors_file < weights.checkpoint"
    " < operands weights.latent_tensors < adapted weights.quantized < weights.fp8_checkpoint"
    " < weights.gguf_checkpoint"
    " < weights.quantization < plan < weights < pooling < adapters < kv_file lowering memory models < options"
    " < saving < *",
    "engine_core": "averages crash_journal executor grammar.text host kv_tiers.page_server kv_tiers.tier"
    " transport.waker"
    " < request < validation < decoding < scheduling.batch scheduling.prefill_budget < feature < speculation"
    " < scheduling < grammar < prefix_reports trace transport < stats < *",
    "frontend": "* < text < bad_words beam_search engine_args vllm.names < sampling < client request_params"
    " < metrics.prometheus < metrics.adapters metrics.routers < metrics.engine metrics.requests < metrics.reader"
    " < async_llm llm llm_engine < metrics < evaluation http < cli ray",
    "frontend.text": "token_bytes tokenizer_files < fewest_tokens tokenizer_trial < tokenizer < * < chat detokenizer"
    " < offsets",
    "frontend.client": "connection observer < * < engine streams",
    "frontend.metrics": "chrome_trace prometheus tracing < * < server",
    "frontend.http": "args errors < transport < * < documentation.operation openai < dialects"
    " < documentation operations < routes < app < server",
    "frontend.http.dialects": "dialect < anthropic llama_cpp ollama < registry",
    "frontend.evaluation": "workload < replay < calibration report < bench simulation",
    "frontend.vllm": "options < fields names script_args < flags",
    "frontend.cli": "failures markdown < flags output < * < bench < app",
}

APART = [("kernels.models", "kernels.emit"), ("kernels.pooling", "kernels.emit")]
"""Parts, and the lower ones that they do not import: a description of a model names no kernel."""

OPTIONAL = {  # imported only when the features of their extras are requested
    "frontend/metrics/tracing.py": {"opentelemetry"},
    "frontend/evaluation/simulation/comparison.py": {"matplotlib"},
    **{f"frontend/ray/{name}.py": {"ray"} for name in ("application", "ingress", "replica", "router", "scaling")},
}
NEVER = {"torch", "transformers", "pickle", "cloudpickle"}  # not for serving; and nothing is ever unpickled


def imported_modules(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of every import, at any depth; `package` resolves relative ones."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from quire import kernels` names the package only among the names.
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def forbidden_imports(source: str, file: Path) -> list[str]:
    """Return the imports of a file, given relative to the repository, that the table of packages forbids."""
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
    """Return the Python files of a package, relative to the repository."""
    return sorted(path.relative_to(REPOSITORY) for path in (REPOSITORY / top).rglob("*.py"))


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the imports between modules, given as sources by dotted name without `quire`.

    A package's `__init__` is a module of its own, named like the package; importing a module inside does not count as
    an import of it, so that a package can re-export names of its modules.
    """
    graph: dict[str, set[str]] = {}
    for name, source in sources.items():
        package = name if any(other.startswith(f"{name}.") for other in sources) else name.rpartition(".")[0]
        imported = (module.removeprefix("quire.") for _, module in imported_modules(source, f"quire.{package}"))
        found = {next((known for known in _prefixes(module) if known in sources), name) for module in imported}
        graph[name] = found - {name}
    return graph


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(len(parts), 0, -1))


def upward_imports(graph: Mapping[str, Iterable[str]], layers: Mapping[str, str] = LAYERS) -> set[tuple[str, str]]:
    """Return the imports that go to a higher layer, or to another part of the same layer."""
    return {
        (module, imported)
        for package, row in layers.items()
        for module, all_imported in graph.items()
        for imported in all_imported
        if module.startswith(f"{package}.") and imported.startswith(f"{package}.")
        if not _is_downward(package, row, module, imported)
    }


def _is_downward(package: str, row: str, module: str, imported: str) -> bool:
    heights = {part: height for height, layer in enumerate(row.split("<")) for part in layer.split()}

    def part_of(name: str) -> str:
        part = next((part for part in _prefixes(name.removeprefix(f"{package}.")) if part in heights), "*")
        assert part in heights, f"LAYERS[{package!r}] names no part for {name}"
        return part

    one, other = part_of(module), part_of(imported)
    return one == other or heights[other] < heights[one]


@cache
def repository_graph() -> dict[str, set[str]]:
    """Return the imports between all modules of the packages."""
    sources = {}
    for top in MAY_IMPORT:
        for file in python_files(top):
            parts = file.with_suffix("").parts
            sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = (REPOSITORY / file).read_text()
    return import_graph(sources)


@pytest.mark.parametrize("top", MAY_IMPORT)
def test_imports_follow_the_table(top: str) -> None:
    files = python_files(top)
    assert files
    problems = [line for file in files for line in forbidden_imports((REPOSITORY / file).read_text(), file)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("package", LAYERS)
def test_imports_go_to_lower_layers(package: str) -> None:
    graph = repository_graph()
    assert any(module.startswith(f"{package}.") for module in graph)
    found = upward_imports(graph, {package: LAYERS[package]})
    assert not found, "\n".join(f"{module} imports {imported}" for module, imported in sorted(found))


@pytest.mark.parametrize(("part", "other"), APART)
def test_parts_that_are_apart_do_not_import_each_other(part: str, other: str) -> None:
    graph = repository_graph()
    assert any(module.startswith(f"{other}.") for module in graph)
    imports = [(module, found) for module, all_found in graph.items() for found in all_found]
    assert not [pair for pair in imports if pair[0].startswith(f"{part}.") and pair[1].startswith(f"{other}.")]


def test_no_modules_import_in_a_cycle() -> None:
    try:
        TopologicalSorter(repository_graph()).prepare()
    except CycleError as error:
        pytest.fail(" is imported by ".join(error.args[1]))


def test_no_two_classes_have_one_name() -> None:
    files: defaultdict[str, list[str]] = defaultdict(list)
    for top in MAY_IMPORT:
        for file in python_files(top):
            for node in ast.walk(ast.parse((REPOSITORY / file).read_text())):
                if isinstance(node, ast.ClassDef):
                    files[node.name].append(str(file))
    assert {name: places for name, places in files.items() if len(places) > 1} == {}


@pytest.mark.parametrize("top", MAY_IMPORT)
def test_every_package_is_typed(top: str) -> None:
    assert (REPOSITORY / top / "py.typed").exists()
    assert (REPOSITORY / top / "__init__.py").exists()
    assert not (REPOSITORY / "__init__.py").exists()


@pytest.mark.parametrize("top", MAY_IMPORT)
def test_every_third_party_import_is_declared(top: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[^\w-]", line)[0] for line in project["dependencies"]}
    always = {name.replace("-", "_") for name in names} - {"pyzmq", "markdown_it_py"} | {"zmq", "markdown_it"}
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


@pytest.mark.parametrize(
    ("source", "is_upward"),
    [
        ("from quire.package.low.module import name", False),
        ("from quire.package.middle import other", False),
        ("from ..low import module", False),
        ("import quire.package.top", True),
        ("if TYPE_CHECKING:\n    from quire.package.beside import module", True),
        ("def f():\n    from ..top import name", True),
    ],
)
def test_an_upward_import_is_found(source: str, is_upward: bool) -> None:
    names = ("low.module", "middle.module", "middle.other", "beside.module", "top")
    sources = {f"package.{name}": "" for name in names} | {"package.middle.module": source}
    upward = upward_imports(import_graph(sources), {"package": "low < middle beside < *"})
    assert bool(upward) is is_upward
