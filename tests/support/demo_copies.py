"""Copies of the demo model that mimic other kinds of chat models."""

from __future__ import annotations

import shutil
from pathlib import Path

from http_server import folder_of_demo_model

THINK, THOUGHT = 1, 2
"""Token ids of `<think>` and `</think>` in `thinking_model`."""

LESS_THAN, BRACKET = 32, 65
"""Token ids of `<`, which begins a tool call of Hermes, and of `]`, which ends the calls of a forced answer."""


def model_with_template(folder: Path, template: str) -> Path:
    """Create `folder` with the demo model and another chat template."""
    shutil.copytree(folder_of_demo_model(), folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def thinking_model(folder: Path, template: str) -> Path:
    """Create a model with another template and `<think>` and `</think>` as special tokens, instead of two others."""
    model_with_template(folder, template)
    file = folder / "tokenizer.json"
    text = file.read_text(encoding="utf-8")
    for old, new in (("<|system|>", "<think>"), ("<|user|>", "</think>")):
        assert f'"{old}"' in text
        text = text.replace(f'"{old}"', f'"{new}"')
    file.write_text(text, encoding="utf-8")
    return folder
