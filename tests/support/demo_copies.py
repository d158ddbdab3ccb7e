"""Copies of the demo model that mimic other kinds of chat models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from chat_templates import GPT_OSS
from http_server import folder_of_demo_model

THINK, THOUGHT = 1, 2
"""Token ids of `<think>` and `</think>` in `thinking_model`."""

LESS_THAN, LINE_END = 32, 203
"""Token ids of `<`, which begins a call of Hermes and of the generic format, and of the line end between calls."""


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


CHANNEL_ID, CALL_ID = 1, 2046
"""Token ids of `<|channel|>` and `<|call|>` in `harmony_model`."""


def harmony_model(folder: Path) -> Path:
    """Create a model with the marks and the template of gpt-oss. Only `<|return|>` is an eos token of its files.

    The marks take the place of special tokens, and of the last tokens of the vocabulary, of which no others are made.
    """
    model_with_template(folder, GPT_OSS)
    names = {
        1: "<|channel|>",
        2: "<|message|>",
        3: "<|start|>",
        2045: "<|constrain|>",
        2046: "<|call|>",
        2047: "<|return|>",
    }
    _rename_tokens(folder, names)
    for name, key, value in (
        ("config.json", "eos_token_id", 2047),
        ("generation_config.json", "eos_token_id", [2047]),
        ("tokenizer_config.json", "eos_token", "<|return|>"),
    ):
        config = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps({**config, key: value}), encoding="utf-8")
    return folder


FIM_TOKENS = {1: "<|fim_prefix|>", 2: "<|fim_suffix|>", 3: "<|fim_middle|>"}
REPOSITORY_TOKENS = {2045: "<|fim_pad|>", 2046: "<|repo_name|>", 2047: "<|file_sep|>"}


def infill_model(folder: Path, *, with_files: bool) -> Path:
    """Create a model with tokens for filling in text, and `with_files` for texts of other files."""
    shutil.copytree(folder_of_demo_model(), folder)
    _rename_tokens(folder, FIM_TOKENS | (REPOSITORY_TOKENS if with_files else {}))
    return folder


def _rename_tokens(folder: Path, names: Mapping[int, str]) -> None:
    """Let special tokens take the place of others, of which no further ones are made."""
    file = folder / "tokenizer.json"
    state = json.loads(file.read_text(encoding="utf-8"))
    old = {token: text for text, token in state["model"]["vocab"].items()}
    state["model"]["vocab"] = {names.get(token, text): token for token, text in old.items()}
    gone = {old[token] for token in names}
    state["model"]["merges"] = [pair for pair in state["model"]["merges"] if "".join(pair) not in gone]
    like = state["added_tokens"][0]
    kept = [token for token in state["added_tokens"] if token["id"] not in names]
    added = [*kept, *({**like, "id": token, "content": text} for token, text in names.items())]
    state["added_tokens"] = sorted(added, key=lambda token: int(token["id"]))
    file.write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")
