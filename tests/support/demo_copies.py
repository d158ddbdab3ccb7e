"""Copies of the demo model that pass for another kind of chat model."""

from __future__ import annotations

import shutil
from pathlib import Path

from http_server import folder_of_demo_model

THINK, THOUGHT = 1, 2
"""Token ids of `<think>` and `</think>` in `thinking_model`."""

LESS_THAN, BRACKET = 32, 65
"""Those of `<`, with which a tool call of Hermes begins, and of `]`, which ends the calls of a forced answer."""


def model_with_template(folder: Path, template: str) -> Path:
    """The demo model with another chat template; `folder` is made."""
    shutil.copytree(folder_of_demo_model(), folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def thinking_model(folder: Path, template: str) -> Path:
    """The same, with `<think>` and `</think>` as special tokens, in the place of two that the template does without."""
    model_with_template(folder, template)
    file = folder / "tokenizer.json"
    text = file.read_text(encoding="utf-8")
    for old, new in (("<|system|>", "<think>"), ("<|user|>", "</think>")):
        assert f'"{old}"' in text
        text = text.replace(f'"{old}"', f'"{new}"')
    file.write_text(text, encoding="utf-8")
    return folder
