"""Packing of adapters for the kernels that read them, in one piece of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.kernels._native import PoolingHead
from quire.kernels.adapted import Adapted, AdaptedColumns, AdaptedEmbedding, AdaptedExperts, AdaptedProduct
from quire.kernels.adapters.adapter import Adapter
from quire.kernels.adapters.blocks import Block, Blocks
from quire.kernels.adapters.changeable import changeable_in, unchangeable
from quire.kernels.adapters.changed_head import NO_HEAD, ClassifierHead
from quire.kernels.adapters.memory import AdapterMemory
from quire.kernels.adapters.packed_products import ExpertsPacking, ProductPacking
from quire.kernels.adapters.packed_rows import ColumnsPacking, EmbeddingPacking
from quire.kernels.emit.layout import Dtypes
from quire.kernels.errors import MemoryShortageError
from quire.kernels.weights.quantization import Quantization

_Packing = ProductPacking | ExpertsPacking | EmbeddingPacking | ColumnsPacking


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter in `num_bytes` of memory: its entry in each table of the plan, in their order."""

    memory: npt.NDArray[np.uint8] | Block  # owns what the entries point to
    entries: Sequence[npt.NDArray[np.int64]]
    num_bytes: int
    head: PoolingHead | None = None  # of its own


def pack_adapter(
    adapted: Sequence[Adapted],
    adapter: Adapter,
    dtypes: Dtypes,
    quantization: Quantization,
    blocks: Blocks | None = None,
    free_bytes: Callable[[], int] | None = None,
    head: ClassifierHead = NO_HEAD,
) -> PackedAdapter:
    """Pack an adapter of a model for all that a plan lets it change, in `blocks` of a device or the host's memory.

    Raises ModelError for one that has more, and MemoryShortageError for one that takes more than `free_bytes` returns:
    a few trained tokens, or experts, may take many times the bytes of their file. `head` classifies.
    """
    unknown = changeable_in(adapted, quantization.checkpoint, head=head.shapes).unchangeable_names(adapter)
    if unknown:
        others = f" and {len(unknown) - 1} other tensors" if len(unknown) > 1 else ""
        raise unchangeable(f"the adapter changes {min(unknown)}{others}")
    changed_head = head.changed(adapter, quantization.checkpoint)
    memory = AdapterMemory()
    packings = [_packing(each, adapter, dtypes, quantization) for each in adapted]
    entries = [packing.pack(memory) for packing in packings]

    if free_bytes is not None and memory.size > (free := free_bytes()):
        raise MemoryShortageError(
            f"the adapter takes {memory.size} bytes of memory, and {free} are left for it; raise --memory-limit if one "
            "is given, lower --max-loras, or give an adapter that changes less"
        )

    def relocate(base: int) -> None:
        for packing in packings:
            packing.finish(base)

    if blocks is None:
        return PackedAdapter(memory.write(relocate), entries, memory.size, changed_head)
    block = blocks.take(memory.size)
    block.write(memory.write(relocate, block.address))
    return PackedAdapter(block, entries, memory.size, changed_head)


def _packing(adapted: Adapted, adapter: Adapter, dtypes: Dtypes, quantization: Quantization) -> _Packing:
    match adapted:
        case AdaptedProduct():
            return ProductPacking(adapted, adapter, dtypes, quantization)
        case AdaptedExperts():
            return ExpertsPacking(adapted, adapter, dtypes, quantization)
        case AdaptedEmbedding():
            return EmbeddingPacking(adapted, adapter, dtypes)
        case AdaptedColumns():
            return ColumnsPacking(adapted, adapter, dtypes)
    raise TypeError(f"{type(adapted).__name__} can't be adapted")
