"""The model's tokenizer as llguidance has it: what each token writes."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from quire.kernels.checkpoint import Checkpoint
from quire.kernels.errors import ModelError

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
        self._tokenizer: LLTokenizer | None = None

    def preload(self) -> None:
        """Begins to make it, on a thread. If it can't be made, `get` tells who needs it."""
        threading.Thread(target=self._try, name="quire-grammar-tokenizer", daemon=True).start()

    def get(self) -> LLTokenizer:
        """The tokenizer; from any thread. ValueError if there is none that can be read."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            return self._tokenizer

    def _try(self) -> None:
        with contextlib.suppress(ValueError):
            self.get()

    def _load(self) -> LLTokenizer:
        from llguidance import LLTokenizer  # takes a while, and many engines never need it

        path = Path(self._folder) / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
            return LLTokenizer(text, eos_token=Checkpoint(self._folder).eos_token_ids() or None)
        except (OSError, ValueError, ModelError) as error:
            raise ValueError(
                f"this engine can't tell what tokens write, since {path} can't be read: {error}; put the model's "
                "tokenizer.json there, or leave structured_outputs out"
            ) from None
