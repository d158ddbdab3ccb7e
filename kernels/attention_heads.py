"""The heads of attention layers, and of layers with a state: their numbers and sizes, on which all parts agree."""

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


@dataclass(frozen=True)
class StateHeads:
    """The heads of a layer that keeps a matrix [key, value] for each of its value heads, in place of keys and values.

    There are `keys` key heads of `key` elements, with as many queries, and `values` value heads of `value` elements.
    Consecutive value heads share a key head; if `interleaved`, every `keys`-th one does.
    """

    keys: int
    values: int
    key: int
    value: int
    interleaved: bool = False

    @property
    def group(self) -> int:
        """Number of value heads that share a key head."""
        return self.values // self.keys

    @property
    def key_columns(self) -> int:
        """Elements of all keys of a token."""
        return self.keys * self.key

    @property
    def value_columns(self) -> int:
        """Elements of all values of a token."""
        return self.values * self.value

    @property
    def channels(self) -> int:
        """Elements of all queries, keys and values of a token."""
        return 2 * self.key_columns + self.value_columns

    def __str__(self) -> str:
        return f"{self.keys}/{self.values} x {self.key} x {self.value}" + (", interleaved" if self.interleaved else "")
