"""Integers of 4 and 8 bits out of 32-bit words, the lowest bits first.

Whole arrays at a time: a matrix of 4096 by 11008 takes some tens of milliseconds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ROWS = 64  # of words at once, so that they stay in the cache
Words = npt.NDArray[np.signedinteger | np.unsignedinteger]


def words_for(count: int, bits: int) -> int:
    """Words that hold `count` integers; the last may be filled up."""
    return -(-count * bits // 32)


def unpack(words: Words, bits: int, count: int) -> npt.NDArray[np.uint8]:
    """`count` integers of each row: u8 [rows, count] from words of 32 bits [rows, words]."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return np.ascontiguousarray(packed[:, :count])
    rows, columns = packed.shape
    out = np.empty((rows, columns), "<u2")
    for row in range(0, rows, _ROWS):  # the byte 0xHL becomes the bytes 0x0L, 0x0H
        wide = packed[row : row + _ROWS].astype("<u2")
        out[row : row + _ROWS] = (wide | wide << 4) & 0x0F0F
    return np.ascontiguousarray(out.view(np.uint8)[:, :count])


def unpack_transposed(words: Words, bits: int, count: int) -> npt.NDArray[np.uint8]:
    """`count` integers of each column: u8 [columns, count] from words of 32 bits [words, columns]."""
    return unpack(transposed(words), bits, count)


def transposed(words: Words) -> Words:
    """A copy of `words` [rows, columns] as [columns, rows]."""
    out = np.empty(words.shape[::-1], words.dtype)
    for row in range(0, len(words), _ROWS):
        out[:, row : row + _ROWS] = words[row : row + _ROWS].T
    return out
