"""The sizes that an engine was started with."""

from __future__ import annotations

from quire.protocol.engine_shape import EngineShape


class EngineLimits(EngineShape, frozen=True, gc=False):
    """The limits of the model, the KV pool and the arguments; fixed for the engine's life."""

    @property
    def tile(self) -> int:
        """Tokens of a tile of attention: chunks that end with one waste nothing, and smaller ones don't pay."""
        return min(self.page_size, 32)

    @property
    def pool_tokens(self) -> int:
        """Positions that all KV pages together hold."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """KV pages that hold `num_tokens` positions."""
        return -(-num_tokens // self.page_size)
