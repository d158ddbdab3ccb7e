"""Elementary functions on vectors, as polynomials of FMAs: the same bits on every instruction set.

IEEE addition, multiplication, division, square root and FMA round the same way everywhere, so functions that are built
from them in a fixed order do too. No libm call is ever emitted.
"""

from __future__ import annotations

import math

from quire.kernels.activations import ACTIVATIONS, ClampedSwiglu, ScaledActivation
from quire.kernels.emit.builder import F32, I8, I16, I32, Builder, Value, with_element

LOG2_E = math.log2(math.e)

# Degree-6 minimax of 2^r on [-1/2, 1/2], relative error about 1e-7; the constant term is exactly 1.
_EXP2 = (1.5469714e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)

# Abramowitz and Stegun 7.1.26: erf(x) = 1 - (a1 t + ... + a5 t^5) exp(-x^2), t = 1 / (1 + p x); error below 1.5e-7.
_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
_ERF_P = 0.3275911

# Taylor series of (e^x - 1 - x) / x^2, whose first omitted term is below 1e-8 for |x| <= 1/2.
_EXP_RESIDUAL = tuple(1.0 / math.factorial(n + 2) for n in range(7, -1, -1))


# 2 artanh(s) / s as a series in s^2, which ends where s is at most 1/3.
_ARTANH = tuple(2.0 / (2 * power + 1) for power in range(8, -1, -1))


def polynomial(b: Builder, x: Value, coefficients: tuple[float, ...]) -> Value:
    """Evaluate a polynomial by Horner's rule with FMAs, the highest coefficient first."""
    result = b.constant(coefficients[0], x.type)
    for coefficient in coefficients[1:]:
        result = b.fma(result, x, coefficient)
    return result


def exp2(b: Builder, x: Value) -> Value:
    """Emit 2^x with x clamped to [-126, 126]; exactly 1 at 0."""
    return exp2_bounded(b, x.min(126.0))


def exp2_bounded(b: Builder, x: Value) -> Value:
    """Emit exp2 of an x that is known to be at most 126, or NaN."""
    x = x.max(-126.0)
    whole = b.unary("math.roundeven", x)
    fraction = polynomial(b, x - whole, _EXP2)
    exponent = b.convert("arith.fptosi", whole, with_element(x.type, I32)) << 23
    return (fraction.bitcast(I32) + exponent).bitcast(F32)


def exp(b: Builder, x: Value) -> Value:
    """Emit e^x, with a relative error of about 2e-7 for |x| < 80."""
    return exp2(b, x * LOG2_E)


def tanh(b: Builder, x: Value) -> Value:
    """Emit (1 - t) / (1 + t) with t = e^(-2 |x|) and the sign of x; absolute error below 3e-7."""
    t = exp(b, b.unary("math.absf", x) * -2.0)
    return b.op("math.copysign", [(1.0 - t) / (t + 1.0), x], x.type)


def softcap(b: Builder, x: Value, cap: float, scale: float = 1.0) -> Value:
    """Emit cap * tanh(scale * x / cap)."""
    return tanh(b, x * (scale / cap)) * cap


def silu(b: Builder, x: Value) -> Value:
    """Emit x / (1 + e^-x)."""
    return x / (exp(b, x * -1.0) + 1.0)


def gelu_tanh(b: Builder, x: Value) -> Value:
    """Emit GPT-2's GELU, x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), written as x sigmoid(2 y)."""
    cubic = b.fma(x * x * x, b.constant(0.044715, x.type), x)
    return x / (exp(b, cubic * (-2.0 * math.sqrt(2.0 / math.pi))) + 1.0)


def gelu_erf(b: Builder, x: Value) -> Value:
    """Emit x/2 (1 + erf(x / sqrt 2))."""
    y = b.unary("math.absf", x * math.sqrt(0.5))
    t = b.constant(1.0, x.type) / b.fma(y, b.constant(_ERF_P, x.type), 1.0)
    tail = polynomial(b, t, _ERF) * t * exp(b, y * y * -1.0)
    erf = b.op("math.copysign", [1.0 - tail, x], x.type)
    return x * 0.5 * (erf + 1.0)


def relu(b: Builder, x: Value) -> Value:
    """Emit max(x, 0)."""
    return x.max(0.0)


def relu2(b: Builder, x: Value) -> Value:
    """Emit the square of max(x, 0)."""
    x = relu(b, x)
    return x * x


def sigmoid(b: Builder, x: Value) -> Value:
    """Emit 1 / (1 + e^-x)."""
    return b.constant(1.0, x.type) / (exp(b, x * -1.0) + 1.0)


def softplus(b: Builder, x: Value) -> Value:
    """Emit log(1 + e^x), as max(x, 0) + log(1 + t) with t = e^-|x|, and log(1 + t) = 2 artanh(t / (2 + t))."""
    t = exp(b, b.unary("math.absf", x) * -1.0)
    s = t / (t + 2.0)
    return b.fma(s, polynomial(b, s * s, _ARTANH), x.max(0.0))


def clamped_swiglu(b: Builder, form: ClampedSwiglu, gate: Value, up: Value) -> Value:
    """Emit the activation of a gate and an up."""
    g, u = gate.min(form.limit), up.min(form.limit).max(-form.limit)
    return g / (exp(b, g * -form.gain) + 1.0) * (u + 1.0)


def xielu(b: Builder, parameters: Value, x: Value) -> Value:
    """Emit the activation of `activations.Xielu` with its four parameters at an address."""
    positive, negative, beta, epsilon = (b.broadcast(b.load(parameters, 4 * i, F32)) for i in range(4))
    least = x.min(epsilon)
    # exp(y) - 1 - y would lose all digits near 0, where the series needs few terms.
    series = polynomial(b, least, _EXP_RESIDUAL) * least * least
    residual = b.select(least < -0.5, exp(b, least) - 1.0 - least, series)
    below = b.fma(residual + (least - x), negative, x * beta)
    return b.select(b.compare("ole", x, 0.0), below, b.fma(x * x, positive, x * beta))


_FUNCTIONS = {"silu": silu, "gelu_tanh": gelu_tanh, "gelu": gelu_erf, "relu": relu, "relu2": relu2}


def activation(b: Builder, form: str | ScaledActivation, x: Value) -> Value:
    """Emit an activation, by the name that checkpoints have for it."""
    if isinstance(form, ScaledActivation):
        return activation(b, form.name, x * form.scale)
    return _FUNCTIONS[ACTIVATIONS[form]](b, x)


def round_bf16(b: Builder, x: Value) -> Value:
    """Round x to bf16 (nearest, ties to even); the bits are in the upper half of i32 lanes, the lower half is zero.

    This uses integer arithmetic, because not every host has bf16 instructions and they treat denormals differently.
    """
    bits = x.bitcast(I32)
    bits = bits + ((bits >> 16) & 1) + 0x7FFF
    return bits & -65536


def upper_half(b: Builder, x: Value) -> Value:
    """Return the upper half of f32 lanes as i16 lanes: the bits of a bf16 if x is one."""
    bits = x.bitcast(I32) >> 16
    return b.convert("arith.trunci", bits, with_element(bits.type, I16))


def magnitude_bits(b: Builder, x: Value) -> Value:
    """Return the bits of |x|, which compare like the magnitudes, with NaN above everything."""
    return x.bitcast(I32) & 0x7FFFFFFF


def int8_scale(b: Builder, largest: Value) -> tuple[Value, Value]:
    """Return the scale that maps `largest` to 127, and its inverse; both are 0 if `largest` is tiny."""
    tiny = largest < 1e-30
    zero = b.constant(0.0, F32)
    return b.select(tiny, zero, largest / 127.0), b.select(tiny, zero, b.constant(127.0, F32) / largest)


def nearest_int8(b: Builder, x: Value) -> Value:
    """Round x, at most 127 in magnitude, to int8, ties to even: adding 1.5 * 2^23 leaves the result in the low bits."""
    bits = (x + 12582912.0).bitcast(I32)
    return b.convert("arith.trunci", bits, with_element(bits.type, I8))


def rsqrt(b: Builder, x: Value) -> Value:
    """Emit 1 / sqrt(x), both steps correctly rounded, but NaN where x is infinite.

    There a sum of squares has overflowed. With zeros for hidden states the model would give some answer nevertheless; a
    NaN is found in the logits, and the request ends with an error.
    """
    return b.constant(1.0, x.type) / b.unary("math.sqrt", x) + (x - x)
