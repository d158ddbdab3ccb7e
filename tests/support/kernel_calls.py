"""Calls of emitted kernels on numpy arrays, and the layouts that they read and write (emit/layout.py)."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kernels.devices.cpu import Cpu
from quire.kernels.devices.cuda import CAPABILITIES
from quire.kernels.devices.instruction_sets import INSTRUCTION_SETS
from quire.kernels.emit.context import EmitContext
from quire.kernels.emit.dots import CUDA
from quire.kernels.emit.layout import PAIRED, PAIRED_ORDER, Dtypes
from quire.kernels.host import cache_folder

Array = npt.NDArray[Any]
_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


def aligned(array: Array) -> Array:
    """Return a copy that starts at a cache line, as kernels expect."""
    memory = np.zeros(array.nbytes + 64, np.uint8)
    offset = -memory.ctypes.data % 64
    copy = memory[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def context_of(isa: str, dtypes: Dtypes) -> EmitContext:
    """Return what kernels are emitted for on a CPU with an instruction set, or on a GPU."""
    return EmitContext(CAPABILITIES if isa == CUDA else INSTRUCTION_SETS[isa].capabilities, dtypes)


class CompiledKernel:
    """The kernel `name` of a text, to run many times."""

    def __init__(self, isa: str, text: str, name: str) -> None:
        self._cpu = Cpu(INSTRUCTION_SETS[isa], cache_folder())  # owns the code
        self._kernel = _KERNEL(self._cpu.compile_text(text, name))

    def run(self, buffers: list[Array], dims: list[int], items: tuple[int, int]) -> None:
        """Run work items [begin, end) over the buffers."""
        addresses = (ctypes.c_void_p * len(buffers))(*(b.ctypes.data for b in buffers))
        sizes = (ctypes.c_int64 * len(dims))(*dims)
        self._kernel(ctypes.addressof(addresses), ctypes.addressof(sizes), *items)


def run(isa: str, text: str, name: str, buffers: list[Array], dims: list[int], items: tuple[int, int]) -> None:
    """Run work items [begin, end) of the kernel `name` over the buffers."""
    CompiledKernel(isa, text, name).run(buffers, dims, items)


def to_bf16(x: Array) -> Array:
    """Round f32 to bf16 (nearest even), as f32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def pack(w: Array, weights: str) -> Array:
    """Pack the weights w[n, k]."""
    n, k = (-(-size // 32) * 32 for size in w.shape)
    padded = np.zeros((n, k), np.float32)
    padded[: w.shape[0], : w.shape[1]] = w
    blocks = padded.reshape(n // 32, 2, 16, k // 32, 16, 2)  # n block, tile, n, k block, pair, parity
    if weights == "f32":
        return aligned(blocks.transpose(0, 3, 1, 4, 5, 2).copy())
    if weights == PAIRED:  # n block, k block, tile, four, parity, n, pair of the four, the second one first
        fours = blocks.reshape(n // 32, 2, 16, k // 32, 8, 2, 2).transpose(0, 3, 1, 4, 6, 2, 5)
        return aligned((fours[..., ::-1].copy().view(np.uint32) >> 16).astype(np.uint16))
    bits = (blocks.transpose(0, 3, 1, 4, 2, 5).copy().view(np.uint32) >> 16).astype(np.uint16)
    return aligned(bits)


def pack_activations(x: Array, storage: str = "f32") -> Array:
    """Pack the activations x[m, k], f32 or, for the other storages, rounded to bf16."""
    m, k = -(-x.shape[0] // 16) * 16, -(-x.shape[1] // 32) * 32
    padded = np.zeros((m, k), np.float32)
    padded[: x.shape[0], : x.shape[1]] = x
    packed = padded.reshape(m // 16, 16, k // 32, 32).transpose(0, 2, 1, 3).copy()
    if storage != "f32":
        packed = (packed.view(np.uint32) >> 16).astype(np.uint16)
    if storage == PAIRED:
        packed = packed.reshape(-1, 4)[:, PAIRED_ORDER].reshape(packed.shape)
    return aligned(packed)


def unpack_activations(x: Array, shape: tuple[int, int], storage: str = "f32") -> Array:
    """Invert `pack_activations`."""
    panels, blocks = x.shape[:2]
    if storage == PAIRED:
        fours = x.reshape(-1, 4)[:, np.argsort(PAIRED_ORDER)]
        x = (fours.astype(np.uint32) << 16).view(np.float32).reshape(x.shape)
    return x.transpose(0, 2, 1, 3).reshape(panels * 16, blocks * 32)[: shape[0], : shape[1]]


def pack_quantized(values: Array, scales: Array, zeros: Array | None, bits: int, group: int) -> Array:
    """Pack u8 values[n, k] with scales[n, groups], one block of 32 columns per row."""
    n, k = values.shape
    columns, span = -(-n // 32) * 32, group or -(-k // 64) * 64
    groups = -(-k // span)
    padded = np.zeros((columns, groups * span), np.uint8)
    padded[:n, :k] = values
    all_scales = np.zeros((columns, groups), np.float16 if group else np.float32)
    all_scales[:n, : scales.shape[1]] = scales
    blocks = padded.reshape(columns // 32, 2, 16, groups, span)
    if bits == 8:
        lines = blocks.reshape(columns // 32, 2, 16, groups, span // 4, 4).transpose(0, 3, 4, 1, 2, 5)
    else:
        halves = blocks.reshape(columns // 32, 2, 16, groups, span // 8, 2, 4)
        lines = (halves[..., 0, :] | halves[..., 1, :] << 4).transpose(0, 3, 4, 1, 2, 5)
    parts = [all_scales.reshape(columns // 32, 32, groups).transpose(0, 2, 1).copy().view(np.uint8)]
    if zeros is not None:
        all_zeros = np.zeros((columns, groups), np.int16)
        all_zeros[:n, : zeros.shape[1]] = zeros
        parts.append(all_zeros.reshape(columns // 32, 32, groups).transpose(0, 2, 1).copy().view(np.uint8))
    parts.append(lines.reshape(columns // 32, groups, -1))
    return aligned(np.concatenate(parts, axis=2).reshape(columns // 32, -1))


def pack_quantized_activations(q: Array, scales: Array, depth: int, span: int) -> Array:
    """Pack int8 activations q[m, k] with scales[m, groups], one panel per row.

    `depth` is the padded k, and `span` elements of k share a scale. With groups of 32, whole pairs of them, there is a
    third word: the sum of the first 16 elements.
    """
    m, groups = -(-q.shape[0] // 16) * 16, depth // 32 if span == 32 else scales.shape[1]
    padded = np.zeros((m, max(depth, groups * span)), np.int8)
    padded[: q.shape[0], : q.shape[1]] = q
    grouped = padded[:, : groups * span].reshape(m, groups, span)
    all_scales = np.zeros((m, groups), np.float32)
    all_scales[: q.shape[0], : scales.shape[1]] = scales
    words = [all_scales.view(np.int32), grouped.sum(2, dtype=np.int32)]
    if span == 32:
        words.append(grouped[:, :, :16].sum(2, dtype=np.int32))
    values = padded[:, :depth].reshape(m // 16, 16, depth // 64, 64).transpose(0, 2, 1, 3).reshape(m // 16, -1)
    table = np.stack(words, axis=2).reshape(m // 16, 16, groups, len(words)).transpose(0, 2, 3, 1)
    return aligned(np.concatenate([values.view(np.uint8), table.reshape(m // 16, -1).copy().view(np.uint8)], axis=1))
