"""Activations of feed-forward layers and pooling heads, by name and as plain data."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}
"""Functions by the names that checkpoints use (`hidden_act`, `activation_function`).

`gelu` is x/2 (1 + erf(x / sqrt 2)), and `gelu_tanh` GPT-2's approximation of it.
"""


@dataclass(frozen=True)
class ScaledActivation:
    """The activation `name` of `scale` times its input."""

    name: str
    scale: float


@dataclass(frozen=True)
class ClampedSwiglu:
    """SwiGLU of gpt-oss: g sigmoid(gain g) (u + 1), with g = min(gate, limit) and u = up clamped to +-limit."""

    limit: float
    gain: float


@dataclass(frozen=True)
class Xielu:
    """xIELU (arXiv 2411.13010), whose parameters are tensors of one element that these fields name.

    With p = softplus(alpha_p) and n = beta + softplus(alpha_n) it is p x^2 + beta x for x > 0, or else
    n (exp(min(x, epsilon)) - 1 - x) + beta x.
    """

    alpha_p: str
    alpha_n: str
    beta: str
    epsilon: str


FixedActivation = str | ScaledActivation | ClampedSwiglu
"""An activation without parameters in the checkpoint."""

Activation = FixedActivation | Xielu
