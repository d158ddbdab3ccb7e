"""Compilation of kernels for an instruction set, with a cache on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quire.kernels._native import Jit
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.layout import Dtypes
from quire.kernels.host import InstructionSet

_SYMBOL = "kernel"
_INTRINSIC = "llvm.call_intrinsic"


class Compiler:
    """Compiles kernels, whose code it owns.

    All kernels have one symbol, and code without intrinsics is compiled without the features that tell instruction sets
    of one CPU apart. So the cache finds it for every model and instruction set that has it.
    """

    def __init__(self, isa: InstructionSet, cache: Path) -> None:
        self._isa = isa
        self._jits = {name: Jit(isa.cpu, name, isa.vector_bits, str(cache)) for name in {"", isa.features}}

    def compile(self, kernel: Kernel, dtypes: Dtypes) -> int:
        """Return the address of a kernel."""
        return self.compile_text(replace(kernel, name=_SYMBOL).emit(EmitContext(self._isa.name, dtypes)), _SYMBOL)

    def compile_text(self, text: str, symbol: str) -> int:
        """Return the address of the function `symbol`."""
        return self._jits[self._isa.features if _INTRINSIC in text else ""].compile(text, [symbol])[0]

    @property
    def compiled(self) -> int:
        """Number of kernels that the cache did not have."""
        return sum(jit.compiled for jit in self._jits.values())

    @property
    def rejected(self) -> list[str]:
        """Entries of the cache that were compiled again, each with the reason."""
        return [entry for jit in self._jits.values() for entry in jit.rejected]
