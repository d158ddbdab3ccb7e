"""The choice of what computes a kernel on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.cuda.blocks import BlockBuilder
from quire.kernels.emit.cuda.products import THREADS, BlockProducts
from quire.kernels.emit.cuda.quantized_products import BlockQuantizedProducts
from quire.kernels.emit.cuda.threads import KERNEL, WARP, GpuKernel, LaunchShape, entry
from quire.kernels.emit.cuda.warps import ScratchError, WarpBuilder
from quire.kernels.emit.gemm import GemmKernel
from quire.kernels.emit.layout import QuantizedFormat


@dataclass(frozen=True)
class BlockContext(EmitContext):
    """What kernels are emitted for whose work items are computed by blocks of threads."""

    @property
    def products(self) -> BlockProducts:
        """See EmitContext."""
        return BlockProducts(self.isa, self.dtypes, self.rows_per_item)

    def quantized_products(self, quantized: QuantizedFormat, k: int) -> BlockQuantizedProducts:
        """See EmitContext."""
        return BlockQuantizedProducts(quantized, k, self.isa)


def gpu_kernel(kernel: Kernel, context: EmitContext) -> GpuKernel:
    """Return the kernel for a GPU, by blocks of threads, by half-warps, or by threads if the scratch is too large."""
    if isinstance(kernel, GemmKernel):
        return by_blocks(kernel, context)
    try:
        return by_warps(kernel, context)
    except ScratchError:
        return by_threads(kernel, context)


def by_blocks(kernel: Kernel, context: EmitContext) -> GpuKernel:
    """Return a kernel of products, of which a block of threads computes a work item."""
    b = BlockBuilder(THREADS)
    kernel.build(b, BlockContext(context.capabilities, context.dtypes))
    return b.kernel()


def by_warps(kernel: Kernel, context: EmitContext) -> GpuKernel:
    """Return a kernel of which half a warp computes a work item. Raises ScratchError."""
    b = WarpBuilder()
    kernel.build(b, context)
    return b.kernel()


def by_threads(kernel: Kernel, context: EmitContext) -> GpuKernel:
    """Return a kernel as on a CPU: one thread computes a work item, with its scratch in local memory."""
    shape = LaunchShape(1, WARP)
    return GpuKernel(replace(kernel, name=KERNEL).emit(context) + entry(shape), shape)
