"""Entry functions of GPU kernels: what a launch gives to the threads of a block, and how they are told apart.

A block is a row of threads, which share memory and can wait for each other; 32 in a row are a warp.
"""

from __future__ import annotations

from dataclasses import dataclass

ENTRY = "entry"
"""Name of the function that is launched."""

KERNEL = "kernel"
"""Name of the function that computes work items, which becomes a part of it."""

WARP = 32
"""Threads of a warp."""

SHARED_BYTES = 48 << 10
"""Most bytes of shared memory of a block that every GPU gives without being asked for more."""

MOST_SHARED_BYTES = 99 << 10
"""Most bytes of shared memory of a block that every GPU from sm_80 on gives when it is asked."""


@dataclass(frozen=True)
class LaunchShape:
    """Threads of a work item, the most of a block, the blocks for which a multiprocessor must have registers, and the
    bytes of a block's shared memory for which a GPU must be asked.

    A block computes as many items as its threads suffice for; an item that needs more threads than a block has gets
    several whole blocks.
    """

    threads_per_item: int
    threads_per_block: int
    blocks_at_once: int = 1
    shared_bytes: int = 0


@dataclass(frozen=True)
class GpuKernel:
    """A kernel of a GPU: MLIR text whose function ENTRY is launched in a shape."""

    text: str
    shape: LaunchShape


def register(name: str) -> str:
    """Return the operation that reads a special register of PTX, as `tid.x`, an i32."""
    return f'llvm.call_intrinsic "llvm.nvvm.read.ptx.sreg.{name}"() : () -> i32'


def entry(shape: LaunchShape) -> str:
    """Return the entry function, whose threads compute the items that KERNEL takes one of at a time.

    The number of items is in memory, and the grid may have room for more: so a graph of launches serves steps of
    several sizes.
    """
    limits = f'["nvvm.maxntid", "{shape.threads_per_block}"], ["nvvm.minctasm", "{shape.blocks_at_once}"]'
    return f"""
llvm.func ptx_kernelcc @{ENTRY}(%buffers: !llvm.ptr, %dims: !llvm.ptr, %count: !llvm.ptr)
    attributes {{passthrough = [{limits}]}} {{
  %items = llvm.load %count : !llvm.ptr -> i64
  %thread = {register("tid.x")}
  %threads = {register("ntid.x")}
  %block = {register("ctaid.x")}
  %before = llvm.zext %block : i32 to i64
  %size = llvm.zext %threads : i32 to i64
  %inside = llvm.zext %thread : i32 to i64
  %first = llvm.mul %before, %size : i64
  %number = llvm.add %first, %inside : i64
  %each = llvm.mlir.constant({shape.threads_per_item} : i64) : i64
  %item = llvm.udiv %number, %each : i64
  %there = llvm.icmp "ult" %item, %items : i64
  llvm.cond_br %there, ^compute, ^end
^compute:
  %one = llvm.mlir.constant(1 : i64) : i64
  %next = llvm.add %item, %one : i64
  func.call @{KERNEL}(%buffers, %dims, %item, %next) : (!llvm.ptr, !llvm.ptr, i64, i64) -> ()
  llvm.br ^end
^end:
  llvm.return
}}
"""
