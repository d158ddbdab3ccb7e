"""What an adapter changes of an embedding is packed a rank at a time."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from quire.kernels.adapted import AdaptedEmbedding
from quire.kernels.adapters.adapter import Adapter, LowRank
from quire.kernels.adapters.memory import AdapterMemory
from quire.kernels.adapters.packed_rows import EmbeddingPacking
from quire.kernels.emit.layout import Dtypes
from quire.kernels.errors import ModelError
from quire.kernels.operands import Buffer
from quire.kernels.weights.tensor import Tensor

VOCABULARY, WIDTH, RANK = 1 << 16, 64, 7
FLOATS = Dtypes("f32", "f32", "f32")


def change(a: np.ndarray) -> Adapter:
    b = np.ones((WIDTH, RANK), np.float32)
    stored_a, stored_b = (
        Tensor(name, "f32", array.shape, array.reshape(-1).view(np.uint8)) for name, array in (("A", a), ("B", b))
    )
    return Adapter({}, {"embed": LowRank(stored_a, stored_b, 1.0)})


def packing(a: np.ndarray, dtypes: Dtypes) -> EmbeddingPacking:
    return EmbeddingPacking(AdaptedEmbedding(Buffer("table"), "embed", VOCABULARY, WIDTH), change(a), dtypes)


@pytest.mark.parametrize("weights", ["f32", "bf16"])
def test_no_copy_of_a_whole_is_made(weights: str) -> None:
    a = np.random.default_rng(0).standard_normal((RANK, VOCABULARY), np.float32)
    memory, own = AdapterMemory(), packing(a, replace(FLOATS, weights=weights))
    tracemalloc.start()
    entry = own.pack(memory)
    assert tracemalloc.get_traced_memory()[1] < 100_000, "memory is checked only after this"
    packed = memory.write(own.finish)
    most = memory.size + 5 * 4 * VOCABULARY
    assert tracemalloc.get_traced_memory()[1] < most
    tracemalloc.stop()
    kind = np.float32 if weights == "f32" else np.uint16
    start = int(entry[2]) - packed.ctypes.data
    size = VOCABULARY * 8 * np.dtype(kind).itemsize
    found = packed[start : start + size].view(kind).reshape(VOCABULARY, 8)
    bits = a.view(np.uint32)
    expected = a if weights == "f32" else (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    assert np.array_equal(found[:, :RANK], expected.T)
    assert not found[:, RANK:].any()


def test_values_that_are_too_large_are_an_error() -> None:
    a = np.zeros((RANK, VOCABULARY), np.float32)
    a[3, 5] = 3.4e38
    memory, own = AdapterMemory(), packing(a, replace(FLOATS, weights="bf16"))
    own.pack(memory)
    with pytest.raises(ModelError, match=r"the adapter has values up to 3.4e.38 in A of embed"):
        memory.write(own.finish)
