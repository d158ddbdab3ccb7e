"""Pooling heads: layers between a pooled hidden state and its embedding or the logits of its labels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.kernels._native import PoolingHead
from quire.kernels.activations import ACTIVATIONS
from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.operands import FloatTensors

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

    def add_to(self, head: PoolingHead) -> None:
        """Append the layer to a native head."""
        if self.epsilon is None:
            head.add_linear(self.weight.reshape(-1), self.bias, self.weight.shape[1], self.activation)
        else:
            head.add_norm(self.weight, self.bias, self.epsilon)


def native_head(layers: tuple[HeadLayer, ...]) -> PoolingHead:
    """Return a head of these layers."""
    head = PoolingHead()
    for layer in layers:
        layer.add_to(head)
    return head


class HeadPart(ABC):
    """A layer of a head, as a model file describes it."""

    def shapes(self, inputs: int) -> Mapping[str, tuple[int, ...]]:
        """Return the tensors of the layer alone; none where its weights are those of another one."""
        return {}

    @abstractmethod
    def read(self, tensors: FloatTensors, inputs: int) -> HeadLayer:
        """Read the weights. Raises ModelError if they are missing, or have another shape."""


@dataclass(frozen=True)
class HeadLinear(HeadPart):
    """activation(weight x + bias), with the tensors `name`.weight [outputs, inputs] and, if `bias`, `name`.bias."""

    name: str
    outputs: int
    bias: bool = True
    activation: str = "identity"

    def shapes(self, inputs: int) -> Mapping[str, tuple[int, ...]]:
        """See HeadPart."""
        bias = {f"{self.name}.bias": (self.outputs,)} if self.bias else {}
        return {f"{self.name}.weight": (self.outputs, inputs), **bias}

    def read(self, tensors: FloatTensors, inputs: int) -> HeadLayer:
        """See HeadPart."""
        weight, bias = _read(self.shapes(inputs), tensors)
        return _checked(HeadLayer(weight, bias, self.activation), self.name)


@dataclass(frozen=True)
class HeadNorm(HeadPart):
    """A LayerNorm, with the tensors `name`.weight [inputs] and, if `bias`, `name`.bias."""

    name: str
    epsilon: float
    bias: bool = True

    def shapes(self, inputs: int) -> Mapping[str, tuple[int, ...]]:
        """See HeadPart."""
        names = ("weight", "bias") if self.bias else ("weight",)
        return {f"{self.name}.{name}": (inputs,) for name in names}

    def read(self, tensors: FloatTensors, inputs: int) -> HeadLayer:
        """See HeadPart."""
        weight, bias = _read(self.shapes(inputs), tensors)
        return _checked(HeadLayer(weight, bias, epsilon=self.epsilon), self.name)


@dataclass(frozen=True)
class HeadTokens(HeadPart):
    """The logits of a few tokens, or with `difference` of two tokens the second one's less the first one's.

    The sigmoid of a difference is the softmax over the two. `weight` is the tensor [vocab_size, inputs] of all logits.
    """

    weight: str
    vocab_size: int
    token_ids: tuple[int, ...]
    difference: bool = False

    def read(self, tensors: FloatTensors, inputs: int) -> HeadLayer:
        """See HeadPart."""
        for token_id in self.token_ids:
            if token_id >= self.vocab_size:
                raise ModelError(
                    f"token id {token_id} of the classifier is not among the {self.vocab_size} of the model"
                )
        tensor = tensors.get(self.weight, (self.vocab_size, inputs))
        rows = np.stack([tensor.row(token_id) for token_id in self.token_ids])
        return _checked(HeadLayer(rows[1:] - rows[:1] if self.difference else rows, _NONE), self.weight)


@dataclass(frozen=True)
class Classifier:
    """The head of a classification model, and how the hidden states are pooled for it."""

    pooling_type: str
    parts: tuple[HeadPart, ...]


def read_head(parts: tuple[HeadPart, ...], tensors: FloatTensors, inputs: int) -> tuple[HeadLayer, ...]:
    """Return the layers, each of which has the outputs of the one before as its inputs."""
    layers: list[HeadLayer] = []
    for part in parts:
        layers.append(part.read(tensors, inputs))
        inputs = len(layers[-1].weight)
    return tuple(layers)


def shapes_of_head(parts: tuple[HeadPart, ...], inputs: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors that are of a head alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        shapes |= part.shapes(inputs)
        inputs = part.outputs if isinstance(part, HeadLinear) else inputs
    return shapes


def num_labels(config: ModelConfig) -> int:
    """Return the number of labels: that of `id2label`, or 2 as `transformers` has it."""
    return len(config.options("id2label")) or config.size("num_labels", 2)


def _read(shapes: Mapping[str, tuple[int, ...]], tensors: FloatTensors) -> tuple[Floats, Floats]:
    """Return a layer's weight and bias."""
    weight, *bias = (tensors.get(name, shape).to_f32() for name, shape in shapes.items())
    return weight, bias[0] if bias else _NONE


def _checked(layer: HeadLayer, what: str) -> HeadLayer:
    if not (np.isfinite(layer.weight).all() and np.isfinite(layer.bias).all()):
        raise ModelError(f"{what} of the pooling head holds an infinity or a NaN; the checkpoint may be damaged")
    return layer
