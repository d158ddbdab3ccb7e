"""Passages of a text for calibration: from all parts, of any size, at whole characters."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from quire.frontend.text.passages import TOKENS, passages_of, read_pieces
from quire.frontend.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer(demo_model)


def read_passages(text: Path, tokenizer: Tokenizer) -> list[list[int]]:
    return passages_of(read_pieces(text), tokenizer)


def test_passages_come_from_all_parts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("".join(f"{number:07} " for number in range(40_000)))
    found = [tokenizer.decode(passage) for passage in read_passages(text, tokenizer)]
    firsts = [int(passage.split()[1]) for passage in found]
    assert len(firsts) == 16
    assert [round((after - before) / 100) for before, after in itertools.pairwise(firsts)] == [26] * 15
    assert all(len(passage) <= TOKENS for passage in read_passages(text, tokenizer))


def test_no_more_is_read_than_passages(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = tmp_path / "text"
    with text.open("wb") as file:
        file.write(b"Once upon a time. " * 300)
        os.ftruncate(file.fileno(), 1 << 40)  # zeros are characters, too
    assert len(read_passages(text, tokenizer)) == 16


@pytest.mark.parametrize("letter", ["a", "\u00e4", "\u20ac", "\U0001f600"])
def test_pieces_end_at_whole_characters(letter: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    for before in range(4):
        for after in range(4):
            text.write_text("x" * before + letter * 20_000 + "y" * after)
            for piece in read_pieces(text):
                assert {*piece} <= {letter, "x", "y"}
                assert len(piece.encode()) > 4096 - 2 * len(letter.encode())


def test_a_short_text_is_read_in_all_its_parts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("".join(f"{number:07} " for number in range(1000)))
    found = [tokenizer.decode(passage).split() for passage in read_passages(text, tokenizer)]
    assert len(found) == 7
    assert int(found[0][0]) == 0
    assert int(found[-1][1]) > 480


def test_what_is_no_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"word " * 20 + b"\xff" + b" word" * 2000)
    with pytest.raises(ValueError, match="is not a text in UTF-8"):
        read_passages(text, tokenizer)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a pipe; give a text file"):
        read_passages(tmp_path / "pipe", tokenizer)
    with pytest.raises(ValueError, match="does not exist"):
        read_passages(tmp_path / "nothing", tokenizer)
