"""The arithmetic of sampling, that of native/sampling/logit_math.h: keys that order logits, and integer masses."""

from __future__ import annotations

import numpy as np

from quire.kernels.emit.builder import F32, I32, I64, Builder, Value, with_element

MOST_KEY = 0x7F800000
"""Key of +inf. Those of NaNs are above it, or below LEAST_KEY."""

LEAST_KEY = -0x7F800001
"""Key of -inf."""

_LEAST_EXPONENT = int(np.float32(-30.0).view(np.int32))
_ROUND = 1.5 * 2.0**23  # adding and subtracting it rounds to an integer
_EXP = (
    "1.9875691500e-4",
    "1.3981999507e-3",
    "8.3334519073e-3",
    "4.1665795894e-2",
    "1.6666665459e-1",
    "5.0000001201e-1",
)
_MASS_OF_ONE = 2.0**40


def order_key(b: Builder, x: Value) -> Value:
    """Emit integers that order floats; -0 and +0 are equal."""
    bits = (x + 0.0).bitcast(I32)
    return bits ^ (b.shift_right_signed(bits, 31) & 0x7FFFFFFF)


def key_value(b: Builder, key: Value) -> Value:
    """Emit the floats of keys."""
    return (key ^ (b.shift_right_signed(key, 31) & 0x7FFFFFFF)).bitcast(F32)


def mass_of(b: Builder, x: Value) -> Value:
    """Emit e^x for x <= 0 as a count of 2^-40, an i64, rounded to nearest even."""
    weight = _exp(b, x) * _MASS_OF_ONE
    return b.convert("arith.fptosi", b.unary("math.roundeven", weight), with_element(x.type, I64))


def _exp(b: Builder, x: Value) -> Value:
    """Emit e^x for x <= 0; x below -30 counts as -30. Cephes' expf; each operation rounds by itself."""
    bits = b.op("arith.minui", [x.bitcast(I32), b.constant(_LEAST_EXPONENT, with_element(x.type, I32))],
                with_element(x.type, I32))  # fmt: skip
    x = bits.bitcast(F32)
    n = (x * float(np.float32(float.fromhex("0x1.715476p0"))) + _ROUND) - _ROUND
    r = (x - n * 0.693359375) - n * float(np.float32("-2.12194440e-4"))
    p = b.constant(float(np.float32(_EXP[0])), x.type)
    for coefficient in _EXP[1:]:
        p = p * r + float(np.float32(coefficient))
    p = p * (r * r) + r + 1.0
    exponent = b.convert("arith.fptosi", n, with_element(x.type, I32)) << 23
    return (p.bitcast(I32) + exponent).bitcast(F32)
