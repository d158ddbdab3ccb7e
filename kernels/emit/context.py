"""Emission context and the interface that all kernels share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from quire.kernels.emit.layout import Dtypes
from quire.kernels.emit.products import Products


@dataclass(frozen=True)
class EmitContext:
    """Target of emitted kernels: an instruction set (host.INSTRUCTION_SETS) and the model's dtypes."""

    isa: str
    dtypes: Dtypes

    @property
    def products(self) -> Products:
        """Emitter of products with packed weights."""
        return Products(self.isa, self.dtypes)

    @property
    def kv_products(self) -> Products:
        """Emitter of products with KV pages."""
        return Products(self.isa, self.dtypes.kv)


@dataclass(frozen=True)
class Kernel(ABC):
    """Description of a kernel. Equal descriptions have equal code, so a plan compiles each kernel once."""

    name: str

    @abstractmethod
    def emit(self, context: EmitContext) -> str:
        """Return the kernel as MLIR text."""

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
