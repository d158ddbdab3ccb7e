"""The model's tokenizer as llguidance has it: what each token writes."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from quire.kernels.errors import ModelError
from quire.kernels.runner import Vocabulary
from quire.kernels.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class GrammarTokenizer:
    """Made when it is first needed, and then kept.

    To make one of 150,000 tokens takes a second or two, in which no other Python runs, so that all streams would pause:
    who is going to need it, and minds, lets it `preload` while the model is loaded.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None

    def preload(self) -> None:
        """Begins to make it, on a thread. If it can't be made, `get` tells who needs it."""
        threading.Thread(target=self._try, name="quire-grammar-tokenizer", daemon=True).start()

    def get(self) -> Vocabulary:
        """What tokens write; from any thread.

        ValueError if there is no tokenizer that can be read, RuntimeError if llguidance is of no use.
        """
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            return self._vocabulary

    def _try(self) -> None:
        with contextlib.suppress(ValueError, RuntimeError):
            self.get()

    def _load(self) -> Vocabulary:
        from llguidance import LLTokenizer, _lib  # takes a while, and many engines never need it

        path = Path(self._folder) / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
            own = LLTokenizer(text, eos_token=Checkpoint(self._folder).eos_token_ids() or None)
            return Vocabulary(_lib.__file__, _texts(own), own.eos_tokens, own.tokenize_bytes)
        except (OSError, ValueError, ModelError) as error:
            raise ValueError(
                f"this engine can't tell what tokens write, since {path} can't be read: {error}; put the model's "
                "tokenizer.json there, or leave structured_outputs out"
            ) from None


def _texts(tokenizer: LLTokenizer) -> list[bytes]:
    """What each token writes, as `Vocabulary` wants it."""
    tokens = range(tokenizer.vocab_size)
    return [b"\xff" * tokenizer.is_special_token(token) + tokenizer.decode_bytes([token]) for token in tokens]
