"""The memory of a packed adapter: arrays one after the other, whose addresses are known once all sizes are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kernels.emit.layout import round_up

Bytes = npt.NDArray[np.uint8]
Packed = npt.NDArray[Any]

_LINE = 64


class AdapterMemory:
    """Arrays that are to lie one after the other, each from a cache line on. Until then offsets stand for addresses;
    none is 0."""

    def __init__(self) -> None:
        self.size = _LINE
        self._arrays: list[tuple[int, int, Callable[[Bytes], None]]] = []

    def add(self, array: Packed) -> int:
        """Add an array, whose values may change until `write`; return its offset."""

        def copy(memory: Bytes) -> None:
            memory[:] = array.reshape(-1).view(np.uint8)

        return self.reserve(array.nbytes, copy)

    def reserve(self, size: int, fill: Callable[[Bytes], None]) -> int:
        """Add memory that `fill` writes; return its offset."""
        offset, self.size = self.size, self.size + round_up(size, _LINE)
        self._arrays.append((offset, size, fill))
        return offset

    def write(self, relocate: Callable[[int], None], address: int | None = None) -> Bytes:
        """Return memory with all arrays, once `relocate` has been called with what is to be added to offsets.

        `address`: where the memory will be copied to; by default it stays where it is.
        """
        whole = np.zeros(self.size + _LINE, np.uint8)
        first = -whole.ctypes.data % _LINE
        memory = whole[first : first + self.size]
        relocate(memory.ctypes.data if address is None else address)
        for offset, size, fill in self._arrays:
            fill(memory[offset : offset + size])
        return memory


def relocate(offsets: npt.NDArray[np.int64], base: int) -> None:
    """Replace offsets by addresses in memory that begins at `base`, in place; 0 stands for none."""
    offsets[offsets != 0] += base
