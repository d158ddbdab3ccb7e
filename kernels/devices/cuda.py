"""NVIDIA's GPUs: kernels in PTX, which the driver turns into code. No toolkit and no GPU are needed to compile them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from quire.kernels._native import Device, PtxCompiler
from quire.kernels.emit.builder import F32
from quire.kernels.emit.context import Capabilities, EmitContext, Kernel
from quire.kernels.emit.dots import CUDA
from quire.kernels.errors import ModelError

ARCHITECTURES = ("sm_80", "sm_90", "sm_120")
"""Architectures that kernels are compiled for in tests; others of LLVM's may do as well."""

CAPABILITIES = Capabilities(CUDA, F32, product_rows=16, query_rows=16)
"""Capabilities of every GPU: many threads need many items, so an item has few rows."""

ENTRY = "entry"
"""Name of the function of a kernel's PTX that is launched."""

_SYMBOL = "kernel"
_NOT_YET = "kernels can be compiled for a GPU, but not run on one yet; give --device cpu"

# A thread computes one work item: each may take as long as a row of a product, and local memory is given to threads.
_ENTRY_TEXT = f"""
llvm.func ptx_kernelcc @{ENTRY}(%buffers: !llvm.ptr, %dims: !llvm.ptr, %items: i64) {{
  %thread = llvm.call_intrinsic "llvm.nvvm.read.ptx.sreg.tid.x"() : () -> i32
  %threads = llvm.call_intrinsic "llvm.nvvm.read.ptx.sreg.ntid.x"() : () -> i32
  %block = llvm.call_intrinsic "llvm.nvvm.read.ptx.sreg.ctaid.x"() : () -> i32
  %first = llvm.mul %threads, %block : i32
  %number = llvm.add %first, %thread : i32
  %item = llvm.zext %number : i32 to i64
  %there = llvm.icmp "ult" %item, %items : i64
  llvm.cond_br %there, ^compute, ^end
^compute:
  %one = llvm.mlir.constant(1 : i64) : i64
  %next = llvm.add %item, %one : i64
  func.call @{_SYMBOL}(%buffers, %dims, %item, %next) : (!llvm.ptr, !llvm.ptr, i64, i64) -> ()
  llvm.br ^end
^end:
  llvm.return
}}
"""


class Cuda:
    """A GPU as a `Device`, as far as it compiles kernels: launches are not there yet."""

    def __init__(self, architecture: str, cache: Path) -> None:
        """Raise ModelError for an architecture that LLVM does not know."""
        try:
            self._compiler = PtxCompiler(architecture, str(cache))
        except ValueError as error:
            raise ModelError(f"{error}; give one such as {', '.join(ARCHITECTURES)}") from None

    @property
    def capabilities(self) -> Capabilities:
        """See Device."""
        return CAPABILITIES

    @property
    def native(self) -> Device:
        """See Device."""
        raise ModelError(_NOT_YET)

    @property
    def compiled(self) -> int:
        """See Device."""
        return self._compiler.cache.compiled

    @property
    def rejected(self) -> list[str]:
        """See Device."""
        return self._compiler.cache.rejected

    def compile(self, kernels: Iterable[Kernel], context: EmitContext) -> Iterator[int]:
        """Raise ModelError: see `native`."""
        raise ModelError(_NOT_YET)

    def ptx(self, kernel: Kernel, context: EmitContext) -> str:
        """Return the PTX of a kernel."""
        return self._compiler.compile(replace(kernel, name=_SYMBOL).emit(context) + _ENTRY_TEXT)

    def available_memory(self) -> int:
        """See Device."""
        raise ModelError(_NOT_YET)


def local_bytes(ptx: str) -> int:
    """Return the bytes of local memory that each thread of PTX reserves, for what registers do not hold."""
    return sum(int(size) for size in re.findall(r"\.local \.align \d+ \.b8\s+\w+\[(\d+)\]", ptx))
