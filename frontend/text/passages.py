"""Passages of a text that calibrates the quantization of a model."""

from __future__ import annotations

import codecs
from pathlib import Path

from quire.frontend.path_kind import what_is
from quire.frontend.text.tokenizer import Tokenizer

TOKENS = 256
"""Most tokens of a passage."""

_PASSAGES = 16
_BYTES = 4096
_PASSAGE_BYTES = 1024  # of most passages of a text in English
_LEAST_TOKENS = 256


def read_pieces(path: Path) -> list[str]:
    """Return pieces from all parts of a text file, of which no more is read.

    Raises ValueError if it is no file, can't be read or is not UTF-8.
    """
    if not path.is_file():
        raise ValueError(f"{path} {what_is(path)}; give a text file")
    try:
        size = path.stat().st_size
        count = max(1, min(_PASSAGES, size // _PASSAGE_BYTES))
        pieces = []
        with path.open("rb") as file:
            for number in range(count):
                file.seek(max(0, size - _BYTES) * number // max(1, count - 1))
                pieces.append(_decoded(file.read(_BYTES)))
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text in UTF-8") from None
    return pieces


def passages_of(pieces: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of passages, the beginnings of pieces. Raises ValueError for fewer than 256 in all."""
    passages = [tokenizer.encode(piece)[:TOKENS] for piece in pieces]
    if (count := sum(map(len, passages))) < _LEAST_TOKENS:
        raise ValueError(f"the text has fewer than {_LEAST_TOKENS} tokens ({count}); give one of some thousands")
    return passages


def _decoded(piece: bytes) -> str:
    """Return the text of a piece, without the halves of characters at its ends. Raises UnicodeDecodeError."""
    start = next((at for at in range(min(4, len(piece))) if piece[at] & 0xC0 != 0x80), 0)
    return codecs.getincrementaldecoder("utf-8")().decode(piece[start:])
