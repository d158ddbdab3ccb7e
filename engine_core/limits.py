"""The sizes that an engine was started with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the model, the KV pool and the arguments allow; fixed for the engine's life."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int

    @property
    def pool_tokens(self) -> int:
        """Positions that all KV pages together hold."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """KV pages that hold `num_tokens` positions."""
        return -(-num_tokens // self.page_size)
