"""Chat templates in the files of a model; `renderer` renders them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from quire.frontend.errors import ChatTemplateError
from quire.frontend.path_kind import what_is
from quire.frontend.text.tokenizer_files import has_file, read_json, special_tokens, typed

_CONFIGS = ("tokenizer_config.json", "chat_template.json")


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TemplateConfig(msgspec.Struct):
    chat_template: str | list[_NamedTemplate] | None = None


class TemplateSource(msgspec.Struct, frozen=True):
    """A chat template. `source` is Jinja; `variables` are the special tokens it may name (`bos_token`, ...).

    `file`: the model's file that holds it, for errors.
    """

    source: str
    variables: dict[str, Any]
    file: str | None = None


def find_template(folder: str | os.PathLike[str], name: str = "default", source: str | None = None) -> TemplateSource:
    """Return the chat template `name` of a model folder, or `source` in its place.

    Raises ChatTemplateError if the folder has none, TokenizerError if a file of the tokenizer is broken.
    """
    path, file = Path(folder), None
    if source is None:
        sources = template_sources(path)
        if name not in sources:
            raise ChatTemplateError(_missing(path, name, sorted(sources)))
        source, file = sources[name], str(_file_of(path, name))
    return TemplateSource(source, special_tokens(path, read_json(path, "tokenizer_config.json")), file)


def given_template(given: str) -> str:
    """Return the template that a user gave: the path of its file, or its text, which has braces or several lines.

    Raises ChatTemplateError if there is no such file.
    """
    if "{" in given or "\n" in given:
        return given
    file = Path(given)
    if not file.is_file():
        raise ChatTemplateError(
            f"chat_template={given!r} {what_is(file)}; give the path of a file with a Jinja template, or its text"
        )
    return _text(file)


def template_sources(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Return the chat templates of a model folder by name; the main one is `default`.

    chat_template.jinja and additional_chat_templates/*.jinja override tokenizer_config.json.
    """
    path = Path(folder)
    found = (typed(path, name, read_json(path, name), _TemplateConfig).chat_template for name in _CONFIGS)
    listed = next((each for each in found if each is not None), [])
    sources = {"default": listed} if isinstance(listed, str) else {each.name: each.template for each in listed}
    for file in [*sorted(path.glob("additional_chat_templates/*.jinja")), path / "chat_template.jinja"]:
        if has_file(file):
            sources["default" if file.name == "chat_template.jinja" else file.stem] = _text(file)
    return sources


def _file_of(path: Path, name: str) -> Path:
    """Return the file that `template_sources` has the template from."""
    own = path / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
    configs = (path / each for each in _CONFIGS if read_json(path, each).get("chat_template") is not None)
    return own if has_file(own) else next(configs)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ChatTemplateError(f"{file} cannot be read: {error}; restore the file from the model's source") from error


def _missing(path: Path, name: str, known: list[str]) -> str:
    if known:
        return f"model folder {path} has no chat template named {name!r}; it has {', '.join(known)}"
    return (
        f"model folder {path} has no chat template (neither in tokenizer_config.json nor in chat_template.jinja); "
        "it is a base model: give a prompt instead of messages, or a template with --chat-template FILE"
    )
