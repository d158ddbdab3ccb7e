"""Memory of a device for adapters, which come and go."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy.typing as npt

from quire.kernels._native import Device
from quire.kernels.errors import MemoryShortageError

_LEAST_BYTES = 2 << 20


def block_bytes(size: int) -> int:
    """Return the size of the block that `size` bytes get."""
    return max(_LEAST_BYTES, 1 << max(size - 1, 0).bit_length())


class Block:
    """Memory of a device at `address`, until this object is gone."""

    def __init__(self, device: Device, address: int) -> None:
        self.address = address
        self._device = device

    def write(self, content: npt.NDArray[Any]) -> None:
        """Copy an array to the beginning."""
        if content.nbytes:
            self._device.write(self.address, content)


class Blocks:
    """Blocks of a device's memory. What is no longer used is given to others: a device frees nothing by itself.

    Sizes are powers of two, so that the adapters of a model mostly fit into one another's blocks. Any thread.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._free: dict[int, list[int]] = {}

    def take(self, size: int) -> Block:
        """Return a block of so many bytes. Raises MemoryShortageError if there is none."""
        bytes_ = block_bytes(size)
        with self._lock:
            free = self._free.setdefault(bytes_, [])
            address = free.pop() if free else 0
        try:
            block = Block(self._device, address or self._device.allocate(bytes_))
        except MemoryError:
            raise MemoryShortageError(
                f"an adapter takes {bytes_} bytes, which the device does not have; lower max_loras"
            ) from None
        weakref.finalize(block, free.append, block.address)
        return block
