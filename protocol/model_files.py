"""The files of a model's folder that frontends read and keep: those of the tokenizer and the chat templates."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

_NAMES = (
    "tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.json", "chat_template.jinja",
)  # fmt: skip
_TEMPLATES = "additional_chat_templates/*.jinja"


def hash_text_files(folder: str) -> dict[str, str]:
    """Return the hash of each of these files that the folder has, by name."""
    path = Path(folder)
    found = [file for file in (*(path / name for name in _NAMES), *sorted(path.glob(_TEMPLATES))) if file.is_file()]
    return {
        str(file.relative_to(path)): hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest() for file in found
    }


def hash_of_all(files: Mapping[str, str]) -> str:
    """Return one hash for the result of `hash_text_files`."""
    return hashlib.blake2b(repr(sorted(files.items())).encode(), digest_size=16).hexdigest()
