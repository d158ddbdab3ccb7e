"""Limits of a running engine."""

from __future__ import annotations

from quire.protocol.engine_shape import EngineShape


class EngineLimits(EngineShape, frozen=True, gc=False):
    """Limits by the model, the KV pool and the options; fixed for the engine's life."""

    @property
    def tile(self) -> int:
        """Tokens of an attention tile: chunks that end with a tile waste nothing, and smaller ones do not pay."""
        return min(self.block_size, 32)

    @property
    def pool_tokens(self) -> int:
        """Tokens that all KV pages together hold."""
        return self.num_pages * self.block_size

    def pages_for(self, num_tokens: int) -> int:
        """Return how many KV pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
