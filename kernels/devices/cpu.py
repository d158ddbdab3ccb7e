"""The CPUs of this host: kernels for an instruction set, run by threads in the memory of this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from quire.kernels import host
from quire.kernels._native import CpuDevice, Jit, ThreadPool
from quire.kernels.devices.instruction_sets import InstructionSet
from quire.kernels.emit.context import Capabilities, EmitContext, Kernel
from quire.kernels.errors import ModelError

_SYMBOL = "kernel"
_INTRINSIC = "llvm.call_intrinsic"
_MOST_COMPILERS = 8  # threads, each with the memory of a compiler


def start_threads(count: int, *, pin: bool) -> ThreadPool:
    """Return so many threads of this host, each bound to a CPU of its own with `pin`. Raises ModelError."""
    pool = ThreadPool(count, pin)
    if pin and not pool.pinned:
        raise ModelError(
            f"{pool.size} threads can't be bound to a CPU each here; give fewer (--threads), or no --pin-threads"
        )
    return pool


class Cpu:
    """The CPUs as a `Device`. Threads start, and memory is taken, when `native` is first asked for.

    All kernels have one symbol, and code without intrinsics is compiled without the features that tell instruction sets
    of one CPU apart. So the cache finds it for every model and instruction set that has it.
    """

    def __init__(self, isa: InstructionSet, cache: Path, threads: int = 1, *, pin_threads: bool = False) -> None:
        self.isa = isa
        self._cache = cache
        self._threads = threads
        self._pin_threads = pin_threads

    @property
    def name(self) -> str:
        """See Device."""
        return "cpu"

    @property
    def product(self) -> str:
        """See Device."""
        return ""

    @property
    def in_host_memory(self) -> bool:
        """See Device."""
        return True

    @property
    def own_memory(self) -> int | None:
        """See Device."""
        return None

    @property
    def thread_memory(self) -> int:
        """See Device."""
        return 0

    @property
    def capabilities(self) -> Capabilities:
        """See Device."""
        return self.isa.capabilities

    @cached_property
    def native(self) -> CpuDevice:
        """See Device."""
        return CpuDevice(start_threads(self._threads, pin=self._pin_threads))

    @cached_property
    def _jits(self) -> dict[str, Jit]:
        """Compilers by the features that they use. They own the code."""
        isa, cache = self.isa, str(self._cache)
        return {features: Jit(isa.cpu, features, isa.vector_bits, cache) for features in {"", isa.features}}

    @property
    def compiled(self) -> int:
        """See Device."""
        return sum(jit.cache.compiled for jit in self._jits.values())

    @property
    def rejected(self) -> list[str]:
        """See Device."""
        return [entry for jit in self._jits.values() for entry in jit.cache.rejected]

    def compile(self, kernels: Iterable[Kernel], context: EmitContext) -> Iterator[int]:
        """Yield the addresses of kernels, which several threads compile."""
        texts = [replace(kernel, name=_SYMBOL).emit(context) for kernel in kernels]
        pool = ThreadPoolExecutor(min(self._threads, _MOST_COMPILERS))
        try:
            compiled = {text: pool.submit(self._jit(text).compile, text, [_SYMBOL]) for text in dict.fromkeys(texts)}
            for text in texts:
                yield compiled[text].result()[0]
        finally:
            pool.shutdown(cancel_futures=True)

    def compile_text(self, text: str, symbol: str) -> int:
        """Return the address of the function `symbol`."""
        return self._jit(text).compile(text, [symbol])[0]

    def _jit(self, text: str) -> Jit:
        """Return the compiler of a kernel."""
        return self._jits[self.isa.features if _INTRINSIC in text else ""]

    def available_memory(self) -> int:
        """See Device."""
        return host.available_memory()
