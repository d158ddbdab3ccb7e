"""Layers with state by blocks of threads of a GPU have the bits of the CPU's."""

from __future__ import annotations

from pathlib import Path

import emulated_gpu
import gpu_calls
import numpy as np
import pytest
from kernel_calls import Array, aligned, pack_activations

from quire.kernels.attention_heads import StateHeads
from quire.kernels.emit.convolution import CHANNELS_PER_ITEM, ConvolutionKernel
from quire.kernels.emit.gates import GatedNormKernel, GateKernel
from quire.kernels.emit.layout import Dtypes
from quire.kernels.emit.state_update import StateRatesKernel, StateUpdateKernel, state_bytes

DTYPES = Dtypes("bf16", "bf16", "f32")
ROWS = 41
RECORDS = 7
NONE = -1


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulated_gpu.use(monkeypatch, tmp_path)


def random(*shape: int) -> Array:
    return aligned(np.random.default_rng(shape).standard_normal(shape, np.float32))


def entries_and_writes(record_bytes: int) -> tuple[Array, Array]:
    """Return a decoded token, a prompt without a state, drafts after which records are written, and a second chunk.

    Each has the row, the record that is read, and what is written: the row after, and the record.
    """
    entries: list[tuple[int, int, list[tuple[int, int]]]] = [
        (0, 0, [(1, 0)]),
        (1, NONE, [(4, 1), (5, NONE), (23, 2)]),
        (23, 3, [(24, 3), (25, 4), (27, 5)]),
        (27, 6, [(ROWS, 6)]),
    ]
    writes = [write for _, _, some in entries for write in some]
    firsts = np.cumsum([0, *(len(some) for _, _, some in entries)])
    table = [
        (row, record * record_bytes if record >= 0 else record, first, len(some))
        for (row, record, some), first in zip(entries, firsts, strict=False)
    ]
    return (
        aligned(np.array(table, np.int64)),
        aligned(
            np.array([(end, record * record_bytes if record >= 0 else record) for end, record in writes], np.int64)
        ),
    )


@pytest.mark.parametrize(
    ("heads", "delta", "skip", "threads"),
    [
        (StateHeads(1, 2, 128, 32), True, False, 64),
        (StateHeads(2, 4, 48, 16, interleaved=True), False, True, 64),
        (StateHeads(1, 1, 256, 16), True, True, 64),
        (StateHeads(1, 1, 272, 16), False, False, 16),
    ],
    ids=str,
)
def test_states_are_updated(heads: StateHeads, delta: bool, skip: bool, threads: int) -> None:
    columns = heads.channels + 32
    kernel = StateUpdateKernel("u", heads, columns, 32, 32 + heads.key_columns, 32 + 2 * heads.key_columns, delta, skip)
    rows = random(ROWS, -(-columns // 32) * 32) * np.float32(heads.key**-0.5)
    rates = np.random.default_rng(2).uniform(0.3, 1.0, (ROWS, -(-heads.values // 16) * 16, 2)).astype(np.float32)
    out = np.full((ROWS, -(-heads.value_columns // 32) * 32), 7, np.float32)
    state, items = random(RECORDS, state_bytes(heads) // 4), 4 * heads.values * (heads.value // 16)
    buffers = [*entries_and_writes(state_bytes(heads)), rows, rates, state, out, random(heads.values)]
    chosen = gpu_calls.compare(kernel, DTYPES, buffers, ROWS, items)
    assert chosen.shape.threads_per_item == threads


@pytest.mark.parametrize("taps", [2, 4, 7])
@pytest.mark.parametrize("gated", [False, True])
def test_convolutions(taps: int, gated: bool) -> None:
    channels, columns = 208, 3 * 208 + 16
    kernel = ConvolutionKernel("c", channels, taps, columns, 16, "" if gated else "silu", bias=not gated, gated=gated)
    rows, weight, bias = random(ROWS, -(-columns // 32) * 32), random(taps, channels), random(channels)
    record_bytes = (taps - 1) * channels * 4
    out = np.full((ROWS, -(-channels // 32) * 32), 7, np.float32)
    buffers = [*entries_and_writes(record_bytes), rows, random(RECORDS, record_bytes // 4), weight, out, bias]
    chosen = gpu_calls.compare(kernel, DTYPES, buffers, ROWS, 4 * -(-channels // CHANNELS_PER_ITEM))
    assert chosen.shape.threads_per_item == 256


@pytest.mark.parametrize("steps", [False, True])
def test_rates(steps: bool) -> None:
    values, group = 44, 4 if steps else 0
    kernel = StateRatesKernel("r", values, 2 * values, 0, group, steps, most=0.0 if steps else 0.5)
    rows = [random(5, 96)] * (2 if steps else 1)
    buffers = [*rows, -np.abs(random(48)), random(48), np.zeros((5, 48, 2), np.float32)]
    chosen = gpu_calls.compare(kernel, DTYPES, buffers, 5, 5)
    assert chosen.shape.threads_per_item == 256


@pytest.mark.parametrize(("group", "threads"), [(640, 256), (64, 16)])
@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_norms(group: int, threads: int, gate_first: bool) -> None:
    kernel = GatedNormKernel("n", 2 * group, group, group, 2 * group + 32, 32, 1e-5, gate_first)
    x, gates = random(5, 2 * group), random(5, 2 * group + 32)
    out = pack_activations(np.zeros((5, 2 * group), np.float32))
    chosen = gpu_calls.compare(kernel, DTYPES, [x, gates, out, random(group)], 5, 10)
    assert chosen.shape.threads_per_item == threads


def test_gates() -> None:
    chosen = gpu_calls.compare(GateKernel("g", 528), DTYPES, [pack_activations(random(5, 528)), random(5, 544)], 5, 5)
    assert chosen.shape.threads_per_item == 256
