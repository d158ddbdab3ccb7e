"""Pooling heads: layers between a pooled hidden state and its embedding or the logits of its labels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.kernels._native import Runner
from quire.kernels.activations import ACTIVATIONS
from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.weights.checkpoint import Checkpoint

Floats = npt.NDArray[np.float32]

_ACTIVATIONS = ACTIVATIONS | {name: name for name in ("tanh", "sigmoid", "identity")}
_NONE = np.zeros(0, np.float32)


def activation_of_head(name: str) -> str:
    """Return the native name of an activation. Raises ModelError for one that heads do not have."""
    if name not in _ACTIVATIONS:
        raise ModelError(f"activation {name!r} of a pooling head is not supported; tanh, gelu, relu and silu are")
    return _ACTIVATIONS[name]


@dataclass(frozen=True)
class HeadLayer:
    """A layer with its weights: activation(weight x + bias), or with an `epsilon` a LayerNorm."""

    weight: Floats
    bias: Floats
    activation: str = "identity"
    epsilon: float | None = None

    def add_to(self, runner: Runner) -> None:
        """Append the layer to the runner's pooling head."""
        if self.epsilon is None:
            runner.add_head_linear(self.weight.reshape(-1), self.bias, self.weight.shape[1], self.activation)
        else:
            runner.add_head_norm(self.weight, self.bias, self.epsilon)


class HeadPart(ABC):
    """A layer of a head, as a model file describes it."""

    @abstractmethod
    def read(self, checkpoint: Checkpoint, inputs: int) -> HeadLayer:
        """Read the weights. Raises ModelError if the checkpoint lacks them, or has them in another shape."""


@dataclass(frozen=True)
class HeadLinear(HeadPart):
    """activation(weight x + bias), with the tensors `name`.weight [outputs, inputs] and, if `bias`, `name`.bias."""

    name: str
    outputs: int
    bias: bool = True
    activation: str = "identity"

    def read(self, checkpoint: Checkpoint, inputs: int) -> HeadLayer:
        """See HeadPart."""
        weight = checkpoint.get(f"{self.name}.weight", (self.outputs, inputs)).to_f32()
        bias = checkpoint.get(f"{self.name}.bias", (self.outputs,)).to_f32() if self.bias else _NONE
        return _checked(HeadLayer(weight, bias, self.activation), f"{checkpoint.folder}: {self.name}")


@dataclass(frozen=True)
class HeadNorm(HeadPart):
    """A LayerNorm, with the tensors `name`.weight [inputs] and, if `bias`, `name`.bias."""

    name: str
    epsilon: float
    bias: bool = True

    def read(self, checkpoint: Checkpoint, inputs: int) -> HeadLayer:
        """See HeadPart."""
        weight = checkpoint.get(f"{self.name}.weight", (inputs,)).to_f32()
        bias = checkpoint.get(f"{self.name}.bias", (inputs,)).to_f32() if self.bias else _NONE
        return _checked(HeadLayer(weight, bias, epsilon=self.epsilon), f"{checkpoint.folder}: {self.name}")


@dataclass(frozen=True)
class HeadTokens(HeadPart):
    """The logits of a few tokens, or with `difference` of two tokens the second one's less the first one's.

    The sigmoid of a difference is the softmax over the two. `weight` is the tensor [vocab_size, inputs] of all logits.
    """

    weight: str
    vocab_size: int
    token_ids: tuple[int, ...]
    difference: bool = False

    def read(self, checkpoint: Checkpoint, inputs: int) -> HeadLayer:
        """See HeadPart."""
        for token_id in self.token_ids:
            if token_id >= self.vocab_size:
                raise ModelError(
                    f"token id {token_id} of the classifier is not among the {self.vocab_size} of the model"
                )
        tensor = checkpoint.get(self.weight, (self.vocab_size, inputs))
        rows = np.stack([tensor.row(token_id) for token_id in self.token_ids])
        return _checked(HeadLayer(rows[1:] - rows[:1] if self.difference else rows, _NONE), self.weight)


@dataclass(frozen=True)
class Classifier:
    """The head of a classification model, and how the hidden states are pooled for it."""

    pooling_type: str
    parts: tuple[HeadPart, ...]


def read_head(parts: tuple[HeadPart, ...], checkpoint: Checkpoint, inputs: int) -> tuple[HeadLayer, ...]:
    """Return the layers, each of which has the outputs of the one before as its inputs."""
    layers: list[HeadLayer] = []
    for part in parts:
        layers.append(part.read(checkpoint, inputs))
        inputs = len(layers[-1].weight)
    return tuple(layers)


def num_labels(config: ModelConfig) -> int:
    """Return the number of labels: that of `id2label`, or 2 as `transformers` has it."""
    return len(config.options("id2label")) or config.size("num_labels", 2)


def _checked(layer: HeadLayer, what: str) -> HeadLayer:
    if not (np.isfinite(layer.weight).all() and np.isfinite(layer.bias).all()):
        raise ModelError(f"{what} holds an infinity or a NaN; the checkpoint may be damaged")
    return layer
