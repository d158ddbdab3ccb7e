"""The choice of what computes a kernel on a GPU."""

from __future__ import annotations

from dataclasses import replace

from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.cuda.threads import KERNEL, WARP, GpuKernel, LaunchShape, entry


def gpu_kernel(kernel: Kernel, context: EmitContext) -> GpuKernel:
    """Return a kernel as on a CPU: one thread computes a work item, with its scratch in local memory."""
    shape = LaunchShape(1, WARP)
    return GpuKernel(replace(kernel, name=KERNEL).emit(context) + entry(shape), shape)
