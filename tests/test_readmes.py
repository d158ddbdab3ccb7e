"""READMEs name only files that exist, and only flags that the commands and scripts have."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from quire.frontend.cli.app import app
from quire.protocol.engine_options import EngineProcessOptions
from quire.protocol.options import options_of

REPOSITORY = Path(__file__).parents[1]
PARTS_OF_FRONTEND = ["frontend/demo_model", "frontend/evaluation", "frontend/http"]
FOLDERS = [".", "engine_core", "frontend", *PARTS_OF_FRONTEND, "kernels", "protocol", "scripts", "tests"]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*\b(?!-)")
BINARY = {".npz", ".pyc", ".so", ".safetensors", ".woff2"}
ELSEWHERE = {
    "build/test-checkpoints/",
    "build/fuzz/",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
}  # made by tests, or of a checkpoint


@cache
def command_flags() -> dict[tuple[str, ...], set[str]]:
    """Return the flags of each command of `quire`."""
    found: dict[tuple[str, ...], set[str]] = {}

    def visit(command: Any, path: tuple[str, ...]) -> None:
        names = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        found[path] = names | {"--help", "--help-all"}
        for name, inner in getattr(command, "commands", {}).items():
            visit(inner, (*path, name))

    visit(typer.main.get_command(app), ())
    return found


@cache
def script_flags() -> dict[str, set[str]]:
    """Return the flags in the source of each script, of each that `robustness.py` runs by its name, and of the module
    that describes this machine."""
    scripts = REPOSITORY / "scripts"
    paths = {path.name: path for path in scripts.iterdir() if path.suffix in {"", ".py"} and path.is_file()}
    paths["quire.kernels.info"] = REPOSITORY / "kernels" / "info.py"
    paths |= {f"robustness.py {path.stem}": path for path in (scripts / "robustness").glob("*.py")}
    flags = {name: re.findall(r'"(--[a-z][a-z0-9-]*)"', path.read_text()) for name, path in paths.items()}
    return {name: {*found, "--help"} for name, found in flags.items()}


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings of a Markdown text."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in the shell blocks of a Markdown text."""
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(line, comments=True)


@pytest.fixture(params=FOLDERS)
def readme(request: pytest.FixtureRequest) -> Path:
    """Return the path of a README of the repository."""
    return REPOSITORY / str(request.param) / "README.md"


def test_links_lead_to_files_and_headings(readme: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", FENCED.sub("", readme.read_text())):
        path, _, anchor = link.partition("#")
        target = readme.parent / path if path else readme
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_named_files_and_folders_exist(readme: Path) -> None:
    text = readme.read_text()
    named = set(re.findall(r"`((?:\.\./)*\.?\w[\w./-]*(?:\.(?:py|md|json|sh)|/))`", FENCED.sub("", text)))
    named |= set(re.findall(r"(?<![\w./~])((?:scripts|tests|frontend|\.ci)/[\w./-]*\w)(?![\w*])", text))
    for name in named - ELSEWHERE:
        here = (REPOSITORY / name).exists() or (readme.parent / name).exists()
        assert here or any(readme.parent.rglob(name.rstrip("/"))), name


def test_flags_are_known(readme: Path) -> None:
    known = {option.flag for option in options_of(EngineProcessOptions).values()}
    known = known.union(*command_flags().values(), *script_flags().values())
    text = re.sub(r"`vllm [^`]+`", "", readme.read_text())
    assert set(FLAG.findall(text)) <= known


def test_commands_have_the_flags_they_are_given(readme: Path) -> None:
    for words in commands(readme.read_text()):
        flags = {flag for word in words for flag in FLAG.findall(word) if " " not in word}
        if words[:1] == ["scripts/serve"]:
            words[:1] = ["quire", "serve"]
        if words[:1] == ["quire"]:
            assert flags <= command_flags()[tuple(words[1 : 3 if words[1] in ("bench", "engines", "lora") else 2])], (
                words
            )
        elif len(words) > 1 and words[1].startswith("scripts/"):
            name = Path(words[1]).name
            assert flags <= script_flags()[f"{name} {words[2]}" if name == "robustness.py" else name], words


def test_no_text_installs_quire_from_a_package_index() -> None:
    """`quire` there is another project: what installs Quire names a wheel's path or the repository."""
    name = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["name"]
    by_name = re.compile(rf"pip install[^\n`]*[ '\"](?:quire|{re.escape(name)})(?![\w*./-])")
    assert by_name.search("pip install 'quire[otel]'")
    texts = [REPOSITORY / "README.md"]
    for folder in ("frontend", "engine_core", "kernels", "protocol", "scripts", ".github"):
        texts += [path for path in (REPOSITORY / folder).rglob("*") if path.is_file() and path.suffix not in BINARY]
    for path in texts:
        assert not by_name.search(path.read_text(errors="replace")), path
