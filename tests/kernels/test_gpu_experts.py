"""Routing, grouping and weighted sums of experts by blocks of threads of a GPU have the bits of the CPU's."""

from __future__ import annotations

from pathlib import Path

import emulated_gpu
import gpu_calls
import numpy as np
import pytest
from kernel_calls import Array, aligned, pack_activations

from quire.kernels.devices.cuda import CAPABILITIES
from quire.kernels.emit.context import Kernel
from quire.kernels.emit.experts import CombineKernel, GroupKernel, RouteKernel, ScatterKernel
from quire.kernels.emit.layout import Dtypes
from quire.kernels.emit.rows import SpreadKernel

DTYPES = Dtypes("bf16", "bf16", "f32")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulated_gpu.use(monkeypatch, tmp_path)


def random(*shape: int) -> Array:
    return aligned(np.random.default_rng(shape).standard_normal(shape, np.float32))


def check(kernel: Kernel, buffers: list[Array], rows: int, items: int) -> None:
    assert gpu_calls.compare(kernel, DTYPES, buffers, rows, items).shape.threads_per_item == 256


@pytest.mark.parametrize(
    "kernel",
    [
        RouteKernel("r", 72, 6, "softmax", False, True, 1.0, 1, 1, "max", 1e-3),
        RouteKernel("r", 256, 8, "sigmoid", True, True, 2.5, 8, 4, "top2"),
        RouteKernel("r", 40, 3, "softmax", True, False, 0.5, 5, 2, "max", expert_scales=True),
    ],
    ids=str,
)
def test_routes(kernel: RouteKernel) -> None:
    rows, padded = 6, -(-kernel.experts // 32) * 32
    outputs = random(rows, padded)
    outputs[1, 3], outputs[2], outputs[3] = np.nan, np.nan, 1.0
    chosen, weights = np.zeros((rows, kernel.top_k), np.int32), np.zeros((rows, kernel.top_k), np.float32)
    check(kernel, [outputs, chosen, weights, random(padded), np.abs(random(padded, 1))], rows, rows)


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (40, 4), (600, 8)])
@pytest.mark.parametrize("tokens", [1, 31, 700])
def test_groups(experts: int, top_k: int, tokens: int) -> None:
    generator = np.random.default_rng(tokens)
    numbers = np.stack([generator.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    numbers[tokens // 2 :, 0] = 5  # more than an entry has rows
    slots = np.full((tokens, top_k), -1, np.int32)
    most = min(tokens * top_k, experts) + tokens * top_k // 16
    gpu_group(GroupKernel("g", experts, top_k), [numbers, slots, np.full(1 + 3 * most, -1, np.int64)], tokens)


def gpu_group(kernel: GroupKernel, buffers: list[Array], tokens: int) -> None:
    """Compare with numpy: a CPU's entries have fewer rows."""
    size = CAPABILITIES.product_rows
    numbers, slots, entries = gpu_calls.run(gpu_calls.chosen(kernel, DTYPES), buffers, tokens, (tokens, 1))
    row, expected = 0, []
    for expert in range(kernel.experts):
        [mine] = np.nonzero(numbers.ravel() == expert)
        assert slots.ravel()[mine].tolist() == [*range(row, row + len(mine))]
        expected += [(expert, row + first, min(size, len(mine) - first)) for first in range(0, len(mine), size)]
        row += -(-len(mine) // 16) * 16
    assert entries[0] == len(expected)
    assert entries[1 : 1 + 3 * len(expected)].reshape(-1, 3).tolist() == [[*entry] for entry in expected]
    assert set(entries[1 + 3 * len(expected) :].tolist()) <= {-1}


@pytest.mark.parametrize("add", [False, True])
def test_outputs_are_combined(add: bool) -> None:
    tokens, width, top_k = 5, 560, 3
    slots = np.random.default_rng(0).permutation(32)[: tokens * top_k].astype(np.int32)
    buffers = [random(32, 576), slots, random(tokens, top_k), random(tokens, 576), random(tokens, 577)[:, :576]]
    kernel = CombineKernel("c", width, top_k, 0.7, add, shared=not add)
    check(kernel, [*map(aligned, buffers), random(tokens, 32)], tokens, tokens)


def test_rows_are_scattered() -> None:
    tokens, width, top_k = 5, 560, 3
    slots = np.random.default_rng(0).permutation(32)[: tokens * top_k].astype(np.int32)
    x, out = pack_activations(random(tokens, width)), pack_activations(np.zeros((32, width), np.float32))
    check(ScatterKernel("s", width, top_k), [x, out, slots], tokens, tokens * top_k)


def test_logits_are_spread() -> None:
    outputs, vocabulary = 300, 1000
    tokens = np.random.default_rng(0).permutation(vocabulary)[:outputs].astype(np.int32)
    check(SpreadKernel("s", outputs, vocabulary), [random(3, 320), tokens, random(3, 1024)], 3, 3)
