"""Parts of a plan that adapters may change, each with a table of the adapters in memory: see emit/adapters.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quire.kernels.emit.adapted_rows import EMBEDDING_ENTRY_BYTES
from quire.kernels.emit.adapters import ENTRY_BYTES
from quire.kernels.emit.layout import round_up
from quire.kernels.emit.own_columns import OWN_COLUMNS_BYTES
from quire.kernels.operands import Buffer, Matrix, MatrixPart, Vector

HEAD = "lm_head.weight"
"""The name of the head, also of one whose weights are those of the embedding."""


def most_ranks(max_lora_rank: int) -> int:
    """Return the ranks of an adapter's change of a layer at most: pairs, with one for a bias."""
    return round_up(max_lora_rank + 1, 2)


@dataclass(frozen=True)
class Adapted(ABC):
    """A part of a plan that adapters may change, with its table of adapters."""

    table: Buffer

    @property
    @abstractmethod
    def entry_bytes(self) -> int:
        """Bytes of an adapter in the table."""


@dataclass(frozen=True)
class AdaptedProduct(Adapted):
    """A product that adapters may change: short vectors of `tiles` tiles of 16 ranks, the base's `biases`, and of the
    head the table of columns that adapters have of their own."""

    short: Buffer
    matrix: Matrix
    tiles: int
    biases: Vector | None = None
    own_columns: Buffer | None = None

    @property
    def entry_bytes(self) -> int:
        """See Adapted."""
        return ENTRY_BYTES

    @property
    def layers(self) -> Mapping[str, Sequence[MatrixPart]]:
        """The parts of each layer of the product, by the names that adapters have for their weights.

        A layer has several parts where its tensor holds gates and ups, say, or heads of queries and of gates in turn.
        """
        layers: dict[str, list[MatrixPart]] = {}
        for part in self.matrix.parts:
            layers.setdefault(part.tensor if self.own_columns is None else HEAD, []).append(part)
        return layers


@dataclass(frozen=True)
class AdaptedExperts(Adapted):
    """The products of grouped rows with a layer of each expert, whose entries follow one another in the table."""

    products: tuple[AdaptedProduct, ...]

    @property
    def entry_bytes(self) -> int:
        """See Adapted."""
        return sum(product.entry_bytes for product in self.products)


@dataclass(frozen=True)
class AdaptedEmbedding(Adapted):
    """The embedding `name`, [vocabulary, width]."""

    name: str
    vocabulary: int
    width: int

    @property
    def entry_bytes(self) -> int:
        """See Adapted."""
        return EMBEDDING_ENTRY_BYTES


@dataclass(frozen=True)
class AdaptedColumns(Adapted):
    """The columns of the head, of which an adapter may have some or all of its own; its weights are in the tensor
    `name`, which may be that of the embedding, [vocabulary, width]."""

    name: str
    vocabulary: int
    width: int

    @property
    def entry_bytes(self) -> int:
        """See Adapted."""
        return OWN_COLUMNS_BYTES


def most_bytes(adapted: Iterable[Adapted], max_lora_rank: int, element_bytes: int) -> int:
    """Return the bytes of an adapter's changes of all layers, each of the largest rank."""
    ranks = most_ranks(max_lora_rank)
    return sum(
        ranks * (len(product.layers) * product.matrix.k + product.matrix.n) * element_bytes
        for product in products_of(adapted)
    )


def products_of(adapted: Iterable[Adapted]) -> Iterator[AdaptedProduct]:
    """Yield the products that adapters may change, those of experts too."""
    for each in adapted:
        if isinstance(each, AdaptedProduct):
            yield each
        elif isinstance(each, AdaptedExperts):
            yield from each.products
