"""The model's vocabulary for llguidance: the bytes of each token."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from quire.engine_core.grammar.vocabulary import read_vocabulary
from quire.kernels.errors import ModelError
from quire.kernels.runner import Vocabulary
from quire.kernels.weights.gguf_checkpoint import open_checkpoint
from quire.protocol.resident_memory import trim_heap

PRELOADING_THREAD = "quire-grammar-tokenizer"


class GrammarTokenizer:
    """Reads the vocabulary when it is first needed, and keeps it.

    150,000 tokens take a second or two, in which no other Python runs, so that all streams pause. `preload` reads the
    vocabulary while the model is loaded.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.path = Path(folder) / "tokenizer.json"
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None

    def eos_token_ids(self) -> list[int]:
        """Return the tokens that end a text. Raises ModelError, OSError or ValueError."""
        return open_checkpoint(self._folder).eos_token_ids()

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
        try:
            return read_vocabulary(self.path, self.eos_token_ids())
        except (OSError, ValueError, ModelError) as error:
            raise ValueError(
                f"structured_outputs need the model's tokenizer, and {self.path} can't be read: {error}; put the "
                "model's tokenizer.json there, or leave structured_outputs out"
            ) from None
