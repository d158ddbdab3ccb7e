"""Products of grouped rows, each group by its own weights."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_calls import (
    Array,
    aligned,
    context_of,
    pack,
    pack_activations,
    pack_quantized,
    pack_quantized_activations,
    run,
    to_bf16,
)

from quire.kernels.devices.instruction_sets import available_isas
from quire.kernels.emit.experts import ENTRY_BYTES, ExpertGemmKernel
from quire.kernels.emit.layout import Dtypes, QuantizedFormat

K, N = 96, 80
GROUPS = [(2, 5), (0, 33), (3, 1)]
"""The weights of each group of rows and its number of rows, in the order of the rows; weights 1 have none."""
WEIGHTS = 4
ROWS_PER_ITEM = 16
ISAS = [isa for isa in available_isas() if isa != "amx"]
INT8 = QuantizedFormat(8, 32)


def entries() -> tuple[Array, list[slice]]:
    """Return the list of entries, and the rows of each group."""
    items, rows, row = [], [], 0
    for number, count in GROUPS:
        items += [(number, row + at, min(ROWS_PER_ITEM, count - at)) for at in range(0, count, ROWS_PER_ITEM)]
        rows.append(slice(row, row + count))
        row += -(-count // 16) * 16
    assert ENTRY_BYTES == 8 * 3
    return np.array([len(items), *np.ravel(items)], np.int64), rows


def products(isa: str, form: QuantizedFormat | None, x: Array, weights: Array) -> Array:
    """Return y of all grouped rows; `weights` are packed matrices."""
    kernel = ExpertGemmKernel("g", K, N, quantized=form, experts=WEIGHTS, top_k=1)
    rows, blocks = max(part.stop for part in entries()[1]), -(-N // 32)
    y = aligned(np.full((-(-rows // 16) * 16, blocks * 32), np.nan, np.float32))
    listed = entries()[0]
    text = kernel.emit(context_of(isa, Dtypes("f32", "f32", "f32")))
    run(isa, text, "g", [x, weights, y, listed], [rows], (0, int(listed[0] + 2) * blocks))  # two have no entry
    padding = np.ones(len(y), bool)
    for part in entries()[1]:
        padding[part] = False
    assert np.isnan(y[padding]).all()  # also where work items have no entry
    return y[:, :N]


def operands(form: QuantizedFormat | None) -> tuple[Array, list[Array], Array, list[Array]]:
    """Return packed rows, packed weights, and the values of both."""
    random = np.random.default_rng(7)
    rows = -(-max(part.stop for part in entries()[1]) // 16) * 16
    if form is None:
        x, ws = to_bf16(random.normal(size=(rows, K))), [to_bf16(random.normal(size=(N, K))) for _ in range(WEIGHTS)]
        return pack_activations(x), [pack(w, "f32") for w in ws], x, ws
    q, ones = random.integers(-127, 128, (rows, K)).astype(np.int8), np.ones((rows, K // 32), np.float32)
    values = [random.integers(0, 256, (N, K), np.uint8) for _ in range(WEIGHTS)]
    scales = np.ones((N, K // 32), np.float16)
    packed = [pack_quantized(value, scales, None, 8, 32) for value in values]
    x = pack_quantized_activations(q, ones, form.depth(K), form.span(K))
    return x, packed, q.astype(np.float32), [value.astype(np.float32) - form.middle for value in values]


@pytest.mark.parametrize("form", [None, INT8], ids=["float", "int8"])
def test_rows_of_a_group_are_multiplied_by_its_own_weights(form: QuantizedFormat | None) -> None:
    x, packed, values, ws = operands(form)
    together = aligned(np.concatenate(packed))
    results = []
    for isa in ISAS:
        results.append(products(isa, form, x, together))
        for part, (number, _) in zip(entries()[1], GROUPS, strict=True):
            np.testing.assert_allclose(results[-1][part], values[part] @ ws[number].T, rtol=1e-5, atol=1e-4)
            assert np.array_equal(results[-1][part], results[0][part])
