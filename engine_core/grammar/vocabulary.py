"""A model's vocabulary, read from its tokenizer for llguidance."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.kernels._native import Vocabulary
from quire.kernels.regular_files import open_regular

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def read_vocabulary(path: Path, eos_token_ids: list[int]) -> Vocabulary:
    """Read tokenizer.json. Raises OSError or ValueError, RuntimeError if llguidance does not work."""
    from llguidance import LLTokenizer, _lib  # takes a while, and many engines never need it

    with open_regular(path) as file:
        own = _read(LLTokenizer, file.read().decode(), eos_token_ids)
    return Vocabulary(_lib.__file__, _texts(own), own.eos_tokens, own.tokenize_bytes)


def _read(reader: type[LLTokenizer], text: str, eos_token_ids: list[int]) -> LLTokenizer:
    """Return the tokenizer in a JSON text. Raises ValueError, also for a panic of the library, which is in Rust."""
    try:
        return reader(text, eos_token=eos_token_ids or None)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ValueError(str(error)) from error


def _texts(tokenizer: LLTokenizer) -> list[bytes]:
    """Return the bytes of each token in the form that `Vocabulary` takes: special tokens begin with 0xff."""
    tokens = range(tokenizer.vocab_size)
    return [b"\xff" * tokenizer.is_special_token(token) + tokenizer.decode_bytes([token]) for token in tokens]
