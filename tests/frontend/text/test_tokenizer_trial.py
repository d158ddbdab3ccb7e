from __future__ import annotations

import base64
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers

from quire.frontend.text import tokenizer_trial
from quire.frontend.text.tokenizer import load_tokenizer
from quire.frontend.text.tokenizer_files import TokenizerError
from quire.frontend.text.tokenizer_growth import check_growth


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(members: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", members: list(parts)}


THOUSANDS = replace("a" * 1000, String="a")
MAPPED = base64.b64encode((4).to_bytes(4, "little") + b"trie" + b"x\0" + b"a" * 1000 + b"\0").decode()
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 2000 + [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {"x": {"id": "x", "ids": [0], "tokens": ["x"]}},
}
GROWING: dict[str, dict[str, Any]] = {
    "texts": {"normalizer": sequence("normalizers", THOUSANDS, THOUSANDS, THOUSANDS)},
    "nested sequences": {"normalizer": sequence("normalizers", sequence("normalizers", THOUSANDS))},
    "rare texts": {"normalizer": sequence("normalizers", replace("b" * 9, Regex="x+"), replace("c" * 9, String="b"))},
    "insertions": {"normalizer": sequence("normalizers", *[replace("bb", Regex="(?=.)")] * 4)},
    "a prefix": {"normalizer": sequence("normalizers", {"type": "Prepend", "prepend": "b" * 500})},
    "a map of characters": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": MAPPED}},
    "a decoder": {"decoder": sequence("decoders", replace("b" * 100, String="a"))},
    "special tokens": {"post_processor": TEMPLATE},
}  # fmt: skip


@pytest.fixture(autouse=True)
def passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the files that have passed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quire" / "tokenizers"


def changed(folder: Path, **parts: Any) -> Path:
    small_tokenizers.write(folder, "byte_level")
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))
    return folder


@pytest.mark.parametrize("what", GROWING)
def test_a_tokenizer_that_may_lengthen_a_text_without_measure_is_refused(tmp_path: Path, what: str) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: it.* allowed; restore the file"):
        check_growth(changed(tmp_path / "model", **GROWING[what]))


@pytest.mark.parametrize("kind", small_tokenizers.KINDS)
def test_an_ordinary_tokenizer_passes_once_and_for_all(
    tmp_path: Path, kind: str, passed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_tokenizers.write(tmp_path / "model", kind)
    assert load_tokenizer(folder) is not None
    assert len(list(passed.iterdir())) == 1
    monkeypatch.setattr(tokenizer_trial, "_run_trial", lambda folder: pytest.fail(f"{folder} is tried again"))
    shutil.copytree(folder, tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy") is not None


def test_a_tokenizer_explodes_in_another_process_only(tmp_path: Path, passed: Path) -> None:
    """Its added token holds an `a`, which the library normalizes when it loads the file."""
    exploding = changed(tmp_path / "model", **GROWING["texts"])
    with pytest.raises(TokenizerError, match="may make a text 1000000000 times as long"):
        load_tokenizer(exploding)
    assert not passed.exists()


def test_a_trial_that_takes_too_much_memory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -v 150000\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(TokenizerError, match="is not loaded: it ended the process that tried it, which may take"):
        load_tokenizer(small_tokenizers.write(tmp_path / "model", "byte_level"))
