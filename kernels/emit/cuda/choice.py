"""The choice of what computes a kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import product

from quire.kernels.emit.attention import AttentionKernel, SplitReductionKernel
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.convolution import ConvolutionKernel
from quire.kernels.emit.cuda.blocks import BlockBuilder, RepeatedStoreError
from quire.kernels.emit.cuda.convolution import BlockConvolutionKernel
from quire.kernels.emit.cuda.fast_products import FastProducts
from quire.kernels.emit.cuda.grouping import BlockGroupKernel
from quire.kernels.emit.cuda.latent_attention import in_parts
from quire.kernels.emit.cuda.latent_products import LatentProducts
from quire.kernels.emit.cuda.products import PAIRS_AT_ONCE, SUMS_BYTES, THREADS, BlockProducts
from quire.kernels.emit.cuda.quantized_products import BlockQuantizedProducts
from quire.kernels.emit.cuda.shrink import SHRINK_THREADS, BlockExpertShrinkKernel, BlockShrinkKernel
from quire.kernels.emit.cuda.split_reduction import BlockSplitReductionKernel
from quire.kernels.emit.cuda.state_update import STATE_THREADS, BlockStateUpdateKernel
from quire.kernels.emit.cuda.threads import (
    KERNEL,
    MOST_SHARED_BYTES,
    SHARED_BYTES,
    WARP,
    GpuKernel,
    LaunchShape,
    entry,
)
from quire.kernels.emit.cuda.warps import ScratchError, WarpBuilder
from quire.kernels.emit.embedding import EmbeddingKernel
from quire.kernels.emit.expert_adapters import ExpertShrinkKernel
from quire.kernels.emit.experts import CombineKernel, GroupKernel, RouteKernel, ScatterKernel
from quire.kernels.emit.fetch import FetchKernel
from quire.kernels.emit.gates import CutoffKernel, GatedNormKernel, GateKernel
from quire.kernels.emit.gemm import GemmKernel
from quire.kernels.emit.head_linear import HeadLinearKernel
from quire.kernels.emit.kv import SplitHeadsKernel
from quire.kernels.emit.latent_heads import LatentHeadsKernel
from quire.kernels.emit.layout import BLOCK, TILE_ROWS, QuantizedFormat, round_up
from quire.kernels.emit.products import Products
from quire.kernels.emit.rows import NormKernel, QuantizeKernel, SpreadKernel
from quire.kernels.emit.sampling import SampleKernel
from quire.kernels.emit.shrink import ShrinkKernel
from quire.kernels.emit.state_update import StateRatesKernel, StateUpdateKernel
from quire.kernels.emit.streams import CorrectKernel, PredictKernel, RescaleKernel

_BY_BLOCKS = (
    GemmKernel, HeadLinearKernel, AttentionKernel, SplitReductionKernel, SplitHeadsKernel, LatentHeadsKernel,
    NormKernel, QuantizeKernel, EmbeddingKernel, SpreadKernel, RouteKernel, ScatterKernel, CombineKernel, GateKernel,
    GatedNormKernel, StateRatesKernel, GroupKernel, ConvolutionKernel, StateUpdateKernel, ShrinkKernel,
    SampleKernel, CutoffKernel, PredictKernel, CorrectKernel, RescaleKernel, FetchKernel,
)  # fmt: skip

_OWN_KERNELS: dict[type[Kernel], tuple[Callable[..., Kernel], int]] = {
    SplitReductionKernel: (BlockSplitReductionKernel, THREADS),
    GroupKernel: (BlockGroupKernel, THREADS),
    ConvolutionKernel: (BlockConvolutionKernel, THREADS),
    StateUpdateKernel: (BlockStateUpdateKernel, STATE_THREADS),
    ShrinkKernel: (BlockShrinkKernel, SHRINK_THREADS),
    ExpertShrinkKernel: (BlockExpertShrinkKernel, SHRINK_THREADS),
}
"""Kernels that are written for blocks of threads, and how many."""

FEW_ITEMS = 256
"""Items of up to 16 rows of which 132 multiprocessors get two each. If a linear layer has fewer, two blocks of threads
compute one."""

_LARGEST_KEY = 256
"""Rows of a state's matrix of which a quarter fits the registers of a thread."""


@dataclass(frozen=True)
class BlockContext(EmitContext):
    """Target of kernels whose work items are computed by blocks of threads.

    Products have `sums_bytes` of shared memory for their sums, and those of linear layers `parts` blocks of threads for
    an item.
    """

    sums_bytes: int = SUMS_BYTES
    parts: int = 1

    @property
    def products(self) -> BlockProducts:
        """See EmitContext."""
        products = FastProducts if self.fast_matmul else BlockProducts
        return products(self.isa, self.dtypes, self.rows_per_item, self.sums_bytes, self.parts)

    @property
    def kv_products(self) -> BlockProducts:
        """See EmitContext."""
        return BlockProducts(self.isa, self.dtypes.kv, self.rows_per_item, self.sums_bytes)

    @property
    def latent_products(self) -> LatentProducts:
        """See EmitContext."""
        return LatentProducts(self.isa, self.dtypes.kv, self.rows_per_item, self.sums_bytes)

    def attention_rows(self, group: int) -> int:
        """See EmitContext; rows are read by as many as are computed together."""
        size = max(PAIRS_AT_ONCE)
        return round_up(max(self.capabilities.query_rows, group), size)

    def quantized_products(self, quantized: QuantizedFormat, k: int) -> BlockQuantizedProducts:
        """See EmitContext."""
        return BlockQuantizedProducts(quantized, k, self.isa, self.parts)


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


def by_blocks(
    kernel: Kernel, context: EmitContext, sums_bytes: int = SUMS_BYTES, shared_bytes: int = SHARED_BYTES
) -> GpuKernel:
    """Return a kernel of which a block of threads computes a work item, with so much shared memory at most.

    Raises ScratchError and RepeatedStoreError.
    """
    own, threads = _OWN_KERNELS.get(type(kernel), (None, THREADS))
    if own is not None:
        kernel = own(*(getattr(kernel, field.name) for field in fields(kernel)))
    parts = _parts(kernel, context)
    b = BlockBuilder(threads, parts)
    kernel.build(b, BlockContext(context.capabilities, context.dtypes, context.fast_matmul, sums_bytes, parts))
    return b.kernel(shared_bytes)


def by_warps(kernel: Kernel, context: EmitContext) -> GpuKernel:
    """Return a kernel of which half a warp computes a work item. Raises ScratchError."""
    b = WarpBuilder()
    kernel.build(b, WarpContext(context.capabilities, context.dtypes))
    return b.kernel()


def by_threads(kernel: Kernel, context: EmitContext) -> GpuKernel:
    """Return a kernel as on a CPU: one thread computes a work item, with its scratch in local memory."""
    shape, context = LaunchShape(1, WARP), WarpContext(context.capabilities, context.dtypes)
    return GpuKernel(replace(kernel, name=KERNEL).emit(context) + entry(shape), shape)


def _parts(kernel: Kernel, context: EmitContext) -> int:
    """Return the blocks of threads of a work item: two for linear layers of few columns, a tile of 16 each, unless an
    epilogue takes two tiles together, or the tensor cores multiply bf16."""
    if type(kernel) is not GemmKernel or kernel.epilogue == "gate":
        return 1
    is_fast = context.fast_matmul and kernel.quantized is None
    return 1 if is_fast or -(-kernel.n // BLOCK) >= FEW_ITEMS else 2


def _suits_blocks(kernel: Kernel) -> bool:
    """Return whether a work item has something to do for each thread of a block, and threads have room for it."""
    if isinstance(kernel, StateUpdateKernel):
        return kernel.heads.key <= _LARGEST_KEY
    return not isinstance(kernel, GatedNormKernel) or kernel.group >= THREADS


def _ways_by_blocks(kernel: Kernel, context: EmitContext) -> Iterator[GpuKernel]:
    """Yield the kernel by blocks of threads, with little shared memory for all and with much for sums first."""
    for shared_bytes, part in product((SHARED_BYTES, MOST_SHARED_BYTES), (4, 3, 2, 1)):
        try:
            yield by_blocks(kernel, context, SUMS_BYTES * part // 4, shared_bytes)
        except RepeatedStoreError:
            break
        except ScratchError:
            continue


def _ways(kernel: Kernel, context: EmitContext) -> Iterator[GpuKernel]:
    """Yield the kernel in each way that it can be computed, the fastest first."""
    if isinstance(kernel, _BY_BLOCKS) and _suits_blocks(kernel):
        yield from _ways_by_blocks(kernel, context)
        if isinstance(kernel, AttentionKernel):
            for in_turn in in_parts(kernel, context):
                yield from _ways_by_blocks(in_turn, context)
    try:
        yield by_warps(kernel, context)
    except ScratchError:
        yield by_threads(kernel, context)
