"""Passages of a text that calibrates the quantization of a model."""

from __future__ import annotations

from pathlib import Path

from quire.frontend.path_kind import what_is
from quire.frontend.text.tokenizer import Tokenizer

TOKENS = 256
"""Most tokens of a passage."""

_PASSAGES = 16
_BYTES = 4096
_LEAST_TOKENS = 256


def read_passages(path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of passages from all parts of a text file, of which no more is read.

    Raises ValueError if it can't be read, is not UTF-8, or has fewer than 256 tokens; TokenizerError, a ValueError.
    """
    if not path.is_file():
        raise ValueError(f"{path} {what_is(path)}; give a text file")
    try:
        texts = [_decoded(piece) for piece in _pieces(path)]
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text in UTF-8") from None
    passages = [tokenizer.encode(text)[:TOKENS] for text in texts]
    if (count := sum(map(len, passages))) < _LEAST_TOKENS:
        raise ValueError(f"{path} is a text of fewer than {_LEAST_TOKENS} tokens ({count}); give one of some thousands")
    return passages


def _pieces(path: Path) -> list[bytes]:
    """Return pieces of a file at equal distances."""
    size = path.stat().st_size
    count = max(1, min(_PASSAGES, size // _BYTES))
    with path.open("rb") as file:
        pieces = []
        for number in range(count):
            file.seek((size - _BYTES) * number // (count - 1) if count > 1 else 0)
            pieces.append(file.read(_BYTES))
    return pieces


def _decoded(piece: bytes) -> str:
    """Return the text of a piece, without the halves of characters at its ends. Raises UnicodeDecodeError."""
    start = next((at for at in range(min(4, len(piece))) if piece[at] & 0xC0 != 0x80), 0)
    for end in range(len(piece), max(start, len(piece) - 4), -1):
        try:
            return piece[start:end].decode()
        except UnicodeDecodeError as error:
            if error.start < len(piece) - 4:
                raise
    return piece[start:].decode()
