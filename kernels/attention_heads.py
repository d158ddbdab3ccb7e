"""The heads of attention layers: their numbers and sizes, on which graphs, kernels and KV pages agree."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer: number of query heads, number of KV heads, and elements of each.

    With `latent`, the last `latent` elements of a key are also its value, and KV pages hold no others.
    """

    query: int
    kv: int
    dim: int
    latent: int = 0

    @property
    def value_dim(self) -> int:
        """Elements of a value."""
        return self.latent or self.dim

    @property
    def group(self) -> int:
        """Number of query heads that share a KV head."""
        return self.query // self.kv

    def __str__(self) -> str:
        return f"{self.query}/{self.kv} x {self.dim}" + (f", {self.latent} latent" if self.latent else "")


@dataclass(frozen=True)
class LatentHeads:
    """The heads of latent attention: their number, and elements of each in the projections.

    A query has `nope` elements that are not rotated, then `rope` that are; a value has `value`; a latent has `rank`.
    """

    query: int
    nope: int
    rope: int
    value: int
    rank: int

    @property
    def expanded(self) -> int:
        """Elements of a head's key and value that are made of a latent."""
        return self.nope + self.value

    @property
    def attention(self) -> Heads:
        """Heads of the attention over KV pages: all queries read one key, its rotated part first, then the latent."""
        return Heads(self.query, 1, self.rope + self.rank, self.rank)
