"""Attention gives the same bits however its query tokens are grouped into entries, close to numpy in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import soft_tiles
from kernel_calls import Array, aligned, context_of, pack, run, to_bf16, unpack_activations

from quire.kernels.attention_heads import Heads
from quire.kernels.devices.instruction_sets import INSTRUCTION_SETS, available_isas
from quire.kernels.emit.attention import AttentionKernel
from quire.kernels.emit.builder import BF16
from quire.kernels.emit.kv import KV_TILE
from quire.kernels.emit.layout import PAIRED, PAIRED_ORDER, TILE_ROWS, Dtypes

ISAS = [isa for isa in available_isas() if isa != "amx"]
AMX = "amx"
"""Always in software."""
KV_HEADS = 2


@pytest.fixture(scope="module", autouse=True)
def tiles(tmp_path_factory: pytest.TempPathFactory) -> None:
    soft_tiles.load_library(tmp_path_factory.mktemp("tiles"))


@dataclass(frozen=True)
class Case:
    """Attention of `tokens` tokens from `position` on, with random queries, keys, values and sinks.

    With `later` tokens after them it is an encoder's: all tokens of the sequence attend to each other.
    """

    group: int
    dim: int
    tokens: int
    position: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    quantized: bool = False
    later: int | None = None

    @property
    def heads(self) -> Heads:
        return Heads(KV_HEADS * self.group, KV_HEADS, self.dim)

    @property
    def context(self) -> int:
        return self.position + self.tokens + (self.later or 0)

    def dtypes(self, isa: str, weights: str) -> Dtypes:
        activations = INSTRUCTION_SETS[isa].bf16_activations if weights == "bf16" else "f32"
        return Dtypes(weights, weights, activations, self.quantized)

    def inputs(self, weights: str) -> tuple[Array, Array, Array, Array]:
        """Return q[token, kv, group, dim], k and v[kv, token, dim] as stored, and the scales [2, kv, token]."""
        rng = np.random.default_rng(self.context + self.dim)
        q = 2 * rng.standard_normal((self.tokens, KV_HEADS, self.group, self.dim), np.float32)
        k, v = rng.standard_normal((2, KV_HEADS, self.context, self.dim), np.float32)
        scales = np.ones((2, KV_HEADS, self.context), np.float32)
        if self.quantized:
            k, v = (np.rint(values * 40).clip(-127, 127) for values in (k, v))
            scales = rng.uniform(0.02, 0.03, scales.shape).astype(np.float32)
        return (q, k, v, scales) if weights == "f32" else (to_bf16(q), to_bf16(k), to_bf16(v), scales)

    def pages(self) -> Array:
        """Return the page of each KV tile of the sequence, in a pool that has one page more."""
        count = -(-self.context // KV_TILE)
        return np.random.default_rng(count).permutation(count + 1)[:count].astype(np.int32)

    def pool(self, k: Array, v: Array, scales: Array, weights: str) -> Array:
        """Return the KV tiles of the pool as bytes: no numbers in the other page, and in the keys after the last."""
        storage = "f32" if self.quantized else weights

        def packed(values: Array, scale: Array) -> Array:
            matrix = pack(values, storage)
            stored = matrix.astype(np.int8) if self.quantized else matrix
            parts = [stored.reshape(-1).view(np.uint8)]
            return np.concatenate([*parts, scale.view(np.uint8)] if self.quantized else parts)

        pages = self.pages()
        heads: list[list[Array | None]] = [[None] * (len(pages) + 1) for _ in range(KV_HEADS)]
        for head in range(KV_HEADS):
            for number, page in enumerate(pages):
                part = slice(number * KV_TILE, (number + 1) * KV_TILE)
                keys, values = np.zeros((2, KV_TILE, self.dim), np.float32)
                scale = np.zeros((2, KV_TILE), np.float32)
                length = len(k[head, part])
                keys[:length], values[:length] = k[head, part], v[head, part]
                keys[length:] = 0 if self.quantized else np.nan
                scale[:, :length] = scales[:, head, part]
                heads[head][page] = np.concatenate([packed(keys, scale[0]), packed(values.T, scale[1])])
        size = next(len(tile) for tile in heads[0] if tile is not None)
        none = np.full(size, 255, np.uint8)
        return aligned(np.concatenate([none if tile is None else tile for head in heads for tile in head]))

    def run(self, isa: str, weights: str, sizes: Sequence[int]) -> Array:
        """Return the outputs [token, kv, group, dim], computed in entries of these numbers of tokens, in turns."""
        dtypes = self.dtypes(isa, weights)
        q, k, v, scales = self.inputs(weights)
        columns = -(-self.dim // 32) * 32
        queries: Array = np.zeros((KV_HEADS, self.tokens, self.group, columns), np.float32)
        queries[..., : self.dim] = q.transpose(1, 0, 2, 3)
        if dtypes.activations != "f32":
            queries = (queries.view(np.uint32) >> 16).astype(np.uint16)
        if dtypes.activations == PAIRED:
            queries = queries.reshape(-1, 4)[:, PAIRED_ORDER].reshape(queries.shape)
        more = np.full((TILE_ROWS, columns), -1, np.int32).view(np.float32)  # no numbers: rows that tiles load besides
        queries = np.concatenate([queries.reshape(-1, columns), more.view(queries.dtype)[:, :columns]])
        pages = self.pages()
        stops = np.minimum(np.cumsum(np.resize(sizes, self.tokens)), self.tokens)
        entries = np.array(
            [
                (
                    first,
                    stop - first,
                    self.position + first,
                    pages.ctypes.data,
                    self.position + stop if self.later is None else self.context,
                )
                for first, stop in itertools.pairwise([0, *stops])
                if stop > first
            ],
            np.int64,
        )
        width = self.heads.query * self.dim
        out = np.full((-(-self.tokens // 16), -(-width // 32), 16, 32), 1, queries.dtype)
        sinks = aligned(np.linspace(-1, 3, self.heads.query).astype(np.float32))
        kernel = AttentionKernel(
            "attention",
            self.heads,
            self.dim**-0.5,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            bidirectional=self.later is not None,
        )
        out = aligned(out)
        buffers = [aligned(entries), aligned(queries), self.pool(k, v, scales, weights), out, sinks]
        dims = [self.tokens, 0, self.tokens, len(pages) + 1, len(entries), 0, 0]
        text = kernel.emit(context_of(isa, dtypes))
        if isa == AMX:
            isa, text = "avx2", soft_tiles.software(text)
        run(isa, text, "attention", buffers, dims, (0, len(entries) * KV_HEADS))
        attended = unpack_activations(out, (self.tokens, width), dtypes.activations)
        if dtypes.activations == BF16:
            attended = (attended.astype(np.uint32) << 16).view(np.float32)
        return attended.reshape(self.tokens, KV_HEADS, self.group, self.dim)

    def expected(self, weights: str) -> Array:
        """Return the same in float64."""
        q, k, v, scales = (values.astype(np.float64) for values in self.inputs(weights))
        k, v = k * scales[0, ..., None], v * scales[1, ..., None]
        scores = np.einsum("thgd,hcd->thgc", q, k) * self.dim**-0.5
        if self.softcap:
            scores = self.softcap * np.tanh(scores / self.softcap)
        query, key = np.arange(self.position, self.position + self.tokens)[:, None], np.arange(self.context)
        valid = np.abs(query - key) < (self.window or self.context)
        if self.later is None:
            valid &= key <= query
        weight = np.exp(scores) * valid[:, None, None, :]
        total = weight.sum(-1, keepdims=True)
        if self.sinks:
            sinks = np.linspace(-1, 3, self.heads.query).reshape(KV_HEADS, self.group)
            total = total + np.exp(sinks)[..., None]
        return np.asarray(np.einsum("thgc,hcd->thgd", weight / total, v))


CASES = [
    Case(group=1, dim=64, tokens=70, position=0),
    Case(group=2, dim=128, tokens=40, position=243, sinks=True),
    Case(group=2, dim=64, tokens=48, position=250, window=256),
    Case(group=4, dim=80, tokens=33, position=500, softcap=5.0),
    Case(group=7, dim=128, tokens=30, position=240, window=77, quantized=True),
    Case(group=8, dim=64, tokens=20, position=511, window=300, sinks=True, quantized=True),
    Case(group=2, dim=128, tokens=64, position=230, window=5),
    Case(group=40, dim=64, tokens=3, position=600, quantized=True),
    Case(group=1, dim=128, tokens=35, position=300, window=1),
    Case(group=1, dim=32, tokens=40, position=230, later=300),
    Case(group=2, dim=64, tokens=30, position=240, later=20, quantized=True),
    Case(group=1, dim=64, tokens=64, position=220, window=65, later=100),
]


DTYPES = ("both", "bf16", "f32", "both", "bf16", "f32", "bf16", "f32", "f32", "bf16", "f32", "both")
"""Weights of each case: every attribute has both."""


@pytest.mark.parametrize(
    ("case", "weights"),
    [
        (case, weights)
        for case, chosen in zip(CASES, DTYPES, strict=True)
        for weights in (("bf16", "f32") if chosen == "both" else (chosen,))
    ],
    ids=str,
)
def test_entries_of_any_size_give_the_same_bits(case: Case, weights: str) -> None:
    most = INSTRUCTION_SETS[ISAS[0]].capabilities.tokens_per_entry(case.group)
    alone = case.run(ISAS[0], weights, [1])
    bound = 2e-2 if weights == "bf16" else 2e-5
    np.testing.assert_allclose(alone, case.expected(weights), rtol=bound, atol=bound)
    for isa in [*ISAS, AMX] if weights == BF16 and soft_tiles.IN_SOFTWARE else ISAS:
        assert np.array_equal(case.run(isa, weights, [most, min(3, most), 1]), alone)
        assert np.array_equal(case.run(isa, weights, [min(tokens, most) for tokens in (16, 17, 5)]), alone)
