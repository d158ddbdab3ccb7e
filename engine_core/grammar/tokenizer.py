"""The model's vocabulary for llguidance: the bytes of each token."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from quire.kernels.errors import ModelError
from quire.kernels.regular_files import open_regular
from quire.kernels.runner import Vocabulary
from quire.kernels.weights.gguf_checkpoint import open_checkpoint
from quire.protocol.resident_memory import trim_heap

if TYPE_CHECKING:
    from llguidance import LLTokenizer

PRELOADING_THREAD = "quire-grammar-tokenizer"


class GrammarTokenizer:
    """Reads the vocabulary when it is first needed, and keeps it.

    150,000 tokens take a second or two, in which no other Python runs, so that all streams pause. `preload` reads the
    vocabulary while the model is loaded.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None

    def preload(self) -> None:
        """Begin to read it on a thread. If that fails, `get` raises the error."""
        threading.Thread(target=self._try, name=PRELOADING_THREAD, daemon=True).start()

    def get(self) -> Vocabulary:
        """Return the vocabulary; from any thread.

        Raises ValueError if there is no tokenizer that can be read, RuntimeError if llguidance does not work.
        """
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            return self._vocabulary

    def _try(self) -> None:
        with contextlib.suppress(ValueError, RuntimeError):
            self.get()
            trim_heap()  # reading leaves much of it free

    def _load(self) -> Vocabulary:
        from llguidance import LLTokenizer, _lib  # takes a while, and many engines never need it

        path = Path(self._folder) / "tokenizer.json"
        try:
            with open_regular(path) as file:
                text = file.read().decode()
            own = _read(LLTokenizer, text, open_checkpoint(self._folder).eos_token_ids())
            return Vocabulary(_lib.__file__, _texts(own), own.eos_tokens, own.tokenize_bytes)
        except (OSError, ValueError, ModelError) as error:
            raise ValueError(
                f"structured_outputs need the model's tokenizer, and {path} can't be read: {error}; put the model's "
                "tokenizer.json there, or leave structured_outputs out"
            ) from None


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
