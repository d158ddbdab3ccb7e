"""Files of adapters, of which only what is wanted is read into memory: one that is truncated meanwhile does not harm
the process, as a mapped one would.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.kernels.errors import ModelError
from quire.kernels.regular_files import open_regular
from quire.kernels.weights.tensor import Tensor

_PIECE = 1 << 20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: its `num_bytes` bytes from `start` on; `format` is as in Tensor."""

    name: str
    format: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class AdapterFile:
    """An open file of `size` bytes. All methods raise ModelError for one that can't be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_regular(path)
            self.size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise self._unread(error.strerror or "") from None

    def __enter__(self) -> AdapterFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, start: int, count: int) -> npt.NDArray[np.uint8]:
        """Return `count` bytes from `start` on."""
        try:
            content, done = np.empty(count, np.uint8), 0
            while done < count:
                read = os.preadv(self._file.fileno(), [content[done:].data], start + done)
                if not read:
                    raise ModelError(f"{self.path} is truncated: it has no byte {start + done}")
                done += read
        except OSError as error:
            raise self._unread(error.strerror or "") from None
        except MemoryError:
            raise self._unread("there is too little memory for it") from None
        return content

    def tensor(self, stored: StoredTensor) -> Tensor:
        """Read a tensor."""
        return Tensor(stored.name, stored.format, stored.shape, self.read(stored.start, stored.num_bytes))

    def pieces(self, stored: StoredTensor) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield the bytes of a tensor, a piece at a time."""
        for start in range(0, stored.num_bytes, _PIECE):
            yield self.read(stored.start + start, min(_PIECE, stored.num_bytes - start))

    def _unread(self, reason: str) -> ModelError:
        return ModelError(f"{self.path} can't be read: {reason}")
