"""Files of a model that are pipes or folders are rejected, and never waited for, by the engine and by the frontend."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.engine_core.grammar.tokenizer import GrammarTokenizer
from quire.frontend.errors import ChatTemplateError
from quire.frontend.hub.names import check_model
from quire.frontend.text.chat.template_files import given_template, template_sources
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.text.tokenizer_files import TokenizerError
from quire.kernels.errors import ModelError
from quire.kernels.gguf.container import read_gguf
from quire.kernels.weights.checkpoint import Checkpoint

ENGINE = ["config.json", "model.safetensors", "generation_config.json"]
FRONTEND = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
]  # fmt: skip
MADE: dict[str, Callable[[Path], None]] = {"pipe": os.mkfifo, "folder": Path.mkdir}


def broken(model: Path, folder: Path, name: str, kind: str, *, is_link: bool) -> Path:
    """A copy of a model in which one file is something else, maybe at the end of a link."""
    copy = shutil.copytree(model, folder / "model")
    (copy / name).unlink(missing_ok=True)
    MADE[kind](folder / "other" if is_link else copy / name)
    if is_link:
        (copy / name).symlink_to(folder / "other")
    return copy


@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("name", ENGINE)
def test_the_engine_names_the_file(demo_model: Path, tmp_path: Path, name: str, kind: str, *, is_link: bool) -> None:
    folder = broken(demo_model, tmp_path, name, kind, is_link=is_link)
    with pytest.raises(ModelError, match=rf"{name}.*it is a {kind}, and the files of a model must be regular ones"):
        Checkpoint(str(folder)).eos_token_ids()


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("name", FRONTEND)
def test_the_frontend_names_the_file(demo_model: Path, tmp_path: Path, name: str, kind: str) -> None:
    folder = broken(demo_model, tmp_path, name, kind, is_link=True)
    with pytest.raises(TokenizerError, match=rf"{name} is a {kind}, and the files of a model must be regular ones"):
        Tokenizer(folder)


def test_templates_grammars_and_gguf_files_too(demo_model: Path, tmp_path: Path) -> None:
    for number, name in enumerate(("chat_template.jinja", "tokenizer.json", "model.gguf")):
        folder = broken(demo_model, tmp_path / str(number), name, "pipe", is_link=False)
        if "template" in name:
            with pytest.raises(TokenizerError, match=f"{name} is a pipe"):
                template_sources(folder)
        elif name == "tokenizer.json":
            with pytest.raises(ValueError, match="it is a pipe"):
                GrammarTokenizer(str(folder)).get()
        else:
            with pytest.raises(ModelError, match="it is a pipe"):
                read_gguf([folder / name])


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # which may be 107 bytes long


def make_device(path: Path) -> None:
    path.symlink_to(os.devnull)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder", "file"])
def test_errors_about_given_paths_say_what_is_there(tmp_path: Path, kind: str) -> None:
    make = {**MADE, "socket": make_socket, "device": make_device, "file": Path.touch}[kind]
    given, gguf = tmp_path / "given", tmp_path / "given.gguf"
    make(given)
    make(gguf)
    if kind != "folder":
        with pytest.raises(ValueError, match=rf"given' is a {kind}, neither a folder nor a GGUF file; give the folder"):
            check_model(str(given))
        with pytest.raises(TokenizerError, match=rf"given is a {kind}; a tokenizer is a folder with tokenizer.json"):
            Tokenizer(given)
    if kind not in ("folder", "file"):
        with pytest.raises(ValueError, match=rf"given.gguf' is a {kind}; give the path of a GGUF file"):
            check_model(str(gguf))
    if kind != "file":
        with pytest.raises(ChatTemplateError, match=rf"given' is a {kind}; give the path of a file with a Jinja"):
            given_template(str(given))


def test_errors_about_given_paths_say_that_nothing_is_there(tmp_path: Path) -> None:
    for check in (check_model, given_template, Tokenizer):
        with pytest.raises(ValueError, match=r"nothing.gguf'? does not exist; "):
            check(str(tmp_path / "nothing.gguf"))
