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


Activation = str | ScaledActivation | ClampedSwiglu
