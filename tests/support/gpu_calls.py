"""Calls of a GPU's kernels on numpy arrays; the GPU is emulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from kernel_calls import CompiledKernel, aligned, context_of

from quire.kernels import _native
from quire.kernels._native import PtxCompiler
from quire.kernels.emit.context import Kernel
from quire.kernels.emit.cuda.choice import gpu_kernel
from quire.kernels.emit.cuda.threads import ENTRY, GpuKernel
from quire.kernels.emit.dots import CUDA
from quire.kernels.emit.layout import Dtypes
from quire.kernels.host import cache_folder

Array = npt.NDArray[Any]
_ISA = "avx2"


def run(
    kernel: GpuKernel, buffers: Sequence[Array], rows: int, items: tuple[int, int], dims: dict[str, int] | None = None
) -> list[Array]:
    """Return what buffers hold after a launch whose dims are all `rows`, but for `dims`, and items as (rows of an item,
    repeats)."""
    device = _native.CudaDevice(0, _native.ThreadPool(1, False))
    ptx = PtxCompiler(device.architecture, str(cache_folder())).compile(kernel.text)
    shape = kernel.shape
    number = device.load(ptx, ENTRY, shape.threads_per_item, shape.threads_per_block, shape.shared_bytes)
    addresses = [device.upload(buffer) for buffer in buffers]
    plan = _native.Plan()
    plan.add(number, addresses, "tokens", *items)
    device.run(plan, {dim.name: rows for dim in _native.Dim} | (dims or {}))
    results = [np.empty_like(buffer) for buffer in buffers]
    for address, result in zip(addresses, results, strict=True):
        device.read(address, result.reshape(-1).view(np.uint8))
    return results


def chosen(kernel: Kernel, dtypes: Dtypes) -> GpuKernel:
    """Return the kernel for a GPU."""
    return gpu_kernel(kernel, context_of(CUDA, dtypes))


def compare(kernel: Kernel, dtypes: Dtypes, buffers: Sequence[Array], rows: int, items: int) -> GpuKernel:
    """Compare all that a kernel writes on a GPU in so many work items with what a CPU does. Return the GPU's."""
    of_gpu = chosen(kernel, dtypes)
    results = run(of_gpu, buffers, rows, (rows, items))
    expected = [aligned(buffer) for buffer in buffers]
    text = kernel.emit(context_of(_ISA, dtypes))
    CompiledKernel(_ISA, text, kernel.name).run(expected, [rows] * len(_native.Dim), (0, items))
    for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert result.tobytes() == wanted.tobytes(), number
    return of_gpu
