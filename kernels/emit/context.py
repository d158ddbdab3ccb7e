"""Emission context and the interface that all kernels share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from quire.kernels.emit.amx_products import AmxProducts
from quire.kernels.emit.builder import BF16, Builder
from quire.kernels.emit.layout import Dtypes, QuantizedFormat, round_up
from quire.kernels.emit.products import Products
from quire.kernels.emit.quantized import QuantizedProducts


@dataclass(frozen=True)
class Capabilities:
    """Properties of a device that lowering and emitters use; no order of sums depends on them.

    `isa`: the instruction set. `bf16_activations`: how activations are stored that are rounded to bf16; see Dtypes.
    `product_rows`: rows of a work item of products, which use blocks of weights while these are in a cache, and
    `tile_product_rows` where products are AMX tiles, which need many, to load blocks from memory while others are
    multiplied. `query_rows`: query rows (tokens times heads of a group) of a work item of attention. Rows are multiples
    of 16. `samples`: plans sample tokens, too. `fetches`: inputs of a step are not in the device's memory.
    """

    isa: str
    bf16_activations: str
    product_rows: int = 64
    tile_product_rows: int = 256
    query_rows: int = 64
    samples: bool = False
    fetches: bool = False

    def tokens_per_entry(self, group: int) -> int:
        """Return the number of tokens of one sequence that one attention entry covers."""
        return max(1, self.query_rows // group)


@dataclass(frozen=True)
class EmitContext:
    """Target of emitted kernels: a device, by its capabilities, and the model's dtypes.

    With `fast_matmul` a GPU's products of bf16 weights are sums in an order of their own (cuda/fast_products.py).
    """

    capabilities: Capabilities
    dtypes: Dtypes
    fast_matmul: bool = False

    @property
    def isa(self) -> str:
        """Name of the instruction set."""
        return self.capabilities.isa

    @property
    def rows_per_item(self) -> int:
        """Rows of a work item of products."""
        if self._products_kind.uses_tiles:
            return self.capabilities.tile_product_rows
        return self.capabilities.product_rows

    @property
    def products(self) -> Products:
        """Emitter of products with packed weights."""
        return self._products_kind(self.isa, self.dtypes, self.rows_per_item)

    def quantized_products(self, quantized: QuantizedFormat, k: int) -> QuantizedProducts:
        """Return the emitter of products with `k` packed quantized weights for each output."""
        return QuantizedProducts(quantized, k, self.isa)

    @property
    def kv_products(self) -> Products:
        """Emitter of products with KV pages."""
        return self._products_kind(self.isa, self.dtypes.kv, self.rows_per_item)

    @property
    def _products_kind(self) -> type[Products]:
        return AmxProducts if self.dtypes.activations == BF16 else Products

    @property
    def latent_products(self) -> Products | None:
        """Emitter of products with latents as they are packed as keys; None if they are packed as values before."""
        return None

    def attention_rows(self, group: int) -> int:
        """Return the rows of scratch of a work item of attention, for `group` query heads of a token at least."""
        size = self.capabilities.query_rows
        return round_up(max(size, group), size)


@dataclass(frozen=True)
class Kernel(ABC):
    """Description of a kernel. Equal descriptions have equal code, so a plan compiles each kernel once."""

    name: str

    @abstractmethod
    def build(self, b: Builder, context: EmitContext) -> None:
        """Emit the kernel's operations with a builder."""

    def emit(self, context: EmitContext) -> str:
        """Return the kernel as MLIR text."""
        b = Builder(self.name)
        self.build(b, context)
        return b.text()

    def operations(self, rows: int, pairs: int) -> int:
        """Return the multiplications and additions of products for `rows` rows, or `pairs` of query and key tokens."""
        return 0

    def unit(self, context: EmitContext) -> str:
        """Return the multiply-add unit of the kernel's products: fma, vnni, vpmaddwd, vpmaddubsw, avx512-bf16, amx-bf16
        or amx-int8, on ARM sdot or smull."""
        if context.products.uses_pairs:
            return "avx512-bf16"
        return "amx-bf16" if context.products.uses_tiles else "fma"

    @property
    def shape(self) -> str:
        """Sizes that determine the kernel's work: heads of attention, else the width of a row."""
        return str(getattr(self, "heads", None) or getattr(self, "width", ""))
