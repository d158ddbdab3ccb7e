"""The choice of what computes a kernel on a GPU."""

from __future__ import annotations

from dataclasses import replace

from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.cuda.threads import KERNEL, WARP, GpuKernel, LaunchShape, entry
from quire.kernels.emit.cuda.warps import ScratchError, WarpBuilder


def gpu_kernel(kernel: Kernel, context: EmitContext) -> GpuKernel:
    """Return the kernel for a GPU, by half-warps, or by threads if the scratch is too large."""
    try:
        return by_warps(kernel, context)
    except ScratchError:
        return by_threads(kernel, context)


def by_warps(kernel: Kernel, context: EmitContext) -> GpuKernel:
    """Return a kernel of which half a warp computes a work item. Raises ScratchError."""
    b = WarpBuilder()
    kernel.build(b, context)
    return b.kernel()


def by_threads(kernel: Kernel, context: EmitContext) -> GpuKernel:
    """Return a kernel as on a CPU: one thread computes a work item, with its scratch in local memory."""
    shape = LaunchShape(1, WARP)
    return GpuKernel(replace(kernel, name=KERNEL).emit(context) + entry(shape), shape)
