"""The choice of what computes a kernel on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from quire.kernels.emit.attention import AttentionKernel, SplitReductionKernel
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.cuda.blocks import BlockBuilder, RepeatedStoreError
from quire.kernels.emit.cuda.fast_products import FastProducts
from quire.kernels.emit.cuda.products import SUMS_BYTES, THREADS, BlockProducts
from quire.kernels.emit.cuda.quantized_products import BlockQuantizedProducts
from quire.kernels.emit.cuda.split_reduction import BlockSplitReductionKernel
from quire.kernels.emit.cuda.threads import KERNEL, WARP, GpuKernel, LaunchShape, entry
from quire.kernels.emit.cuda.warps import ScratchError, WarpBuilder
from quire.kernels.emit.embedding import EmbeddingKernel
from quire.kernels.emit.gemm import GemmKernel
from quire.kernels.emit.head_linear import HeadLinearKernel
from quire.kernels.emit.kv import SplitHeadsKernel
from quire.kernels.emit.layout import TILE_ROWS, QuantizedFormat
from quire.kernels.emit.products import Products
from quire.kernels.emit.rows import NormKernel, QuantizeKernel

_BY_BLOCKS = (
    GemmKernel, HeadLinearKernel, AttentionKernel, SplitReductionKernel, SplitHeadsKernel, NormKernel, QuantizeKernel,
    EmbeddingKernel,
)  # fmt: skip


@dataclass(frozen=True)
class BlockContext(EmitContext):
    """Target of kernels whose work items are computed by blocks of threads.

    Products have `sums_bytes` of shared memory for their sums.
    """

    sums_bytes: int = SUMS_BYTES

    @property
    def products(self) -> BlockProducts:
        """See EmitContext."""
        products = FastProducts if self.fast_matmul else BlockProducts
        return products(self.isa, self.dtypes, self.rows_per_item, self.sums_bytes)

    @property
    def kv_products(self) -> BlockProducts:
        """See EmitContext."""
        return BlockProducts(self.isa, self.dtypes.kv, self.rows_per_item, self.sums_bytes)

    def quantized_products(self, quantized: QuantizedFormat, k: int) -> BlockQuantizedProducts:
        """See EmitContext."""
        return BlockQuantizedProducts(quantized, k, self.isa)


@dataclass(frozen=True)
class WarpContext(EmitContext):
    """Target of kernels whose work items are computed by half-warps, or by threads, whose memory is short."""

    @property
    def products(self) -> Products:
        """See EmitContext."""
        return Products(self.isa, self.dtypes, TILE_ROWS)

    @property
    def kv_products(self) -> Products:
        """See EmitContext."""
        return replace(self.products, dtypes=self.dtypes.kv)


def gpu_kernel(kernel: Kernel, context: EmitContext) -> GpuKernel:
    """Return the kernel for a GPU: by blocks of threads, by half-warps, or by threads if the scratch is too large."""
    return next(_ways(kernel, context))


def by_blocks(kernel: Kernel, context: EmitContext, sums_bytes: int = SUMS_BYTES) -> GpuKernel:
    """Return a kernel of which a block of threads computes a work item. Raises ScratchError and RepeatedStoreError."""
    if isinstance(kernel, SplitReductionKernel):
        kernel = BlockSplitReductionKernel(*(getattr(kernel, field.name) for field in fields(kernel)))
    b = BlockBuilder(THREADS)
    kernel.build(b, BlockContext(context.capabilities, context.dtypes, context.fast_matmul, sums_bytes))
    return b.kernel()


def by_warps(kernel: Kernel, context: EmitContext) -> GpuKernel:
    """Return a kernel of which half a warp computes a work item. Raises ScratchError."""
    b = WarpBuilder()
    kernel.build(b, WarpContext(context.capabilities, context.dtypes))
    return b.kernel()


def by_threads(kernel: Kernel, context: EmitContext) -> GpuKernel:
    """Return a kernel as on a CPU: one thread computes a work item, with its scratch in local memory."""
    shape, context = LaunchShape(1, WARP), WarpContext(context.capabilities, context.dtypes)
    return GpuKernel(replace(kernel, name=KERNEL).emit(context) + entry(shape), shape)


def _ways(kernel: Kernel, context: EmitContext) -> Iterator[GpuKernel]:
    """Yield the kernel in each way that it can be computed, the fastest first."""
    if isinstance(kernel, _BY_BLOCKS):
        for sums_bytes in (SUMS_BYTES, SUMS_BYTES // 2, SUMS_BYTES // 4):
            try:
                yield by_blocks(kernel, context, sums_bytes)
            except RepeatedStoreError:
                break
            except ScratchError:
                continue
    try:
        yield by_warps(kernel, context)
    except ScratchError:
        yield by_threads(kernel, context)
