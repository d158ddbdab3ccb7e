"""Selection of the weights that are quantized: by a mode chosen for a float checkpoint, or by the checkpoint itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from quire.kernels._native import GgufMatrix, Mxfp4Matrix
from quire.kernels.config import ModelConfig
from quire.kernels.emit.layout import QuantizedFormat
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Embedding, Linear
from quire.kernels.operands import Matrix, MatrixPart
from quire.kernels.weights.checkpoint import Checkpoint
from quire.kernels.weights.quantized import METHODS, QuantizedMatrix, Scheme, scheme_of
from quire.kernels.weights.tensor import Tensor

Order = npt.NDArray[np.int32]

Place = Literal["body", "attention_output", "feed_forward_output", "head", "router", "small"]
"""Where a linear layer stands. `attention_output` and `feed_forward_output` are the last linear layers of attention and
of feed-forward layers in the first half of a model, whose errors reach more layers than those of others and cost more.
A `router` chooses experts, and is never quantized; a `small` layer is where the checkpoint has it so."""

SMALL_WIDTH = 1024
"""Hidden states of small models are narrower; the same errors cost them more, and bits cost them less."""

_LAYER_WEIGHTS = 12
"""Weights of a usual layer, in squares of the width of hidden states."""


@dataclass(frozen=True)
class Mode:
    """Formats that a float checkpoint is quantized to.

    `body` is the format of most linear layers, and of an embedding that is not the head as well; `attention_output` and
    `feed_forward_output` are those of the layers at these places, where None keeps the model's dtype; `head` is that of
    the head, and of an embedding tied to it. `small`: the mode of small models, if it is another; `lexical`: that of
    small models whose vocabulary has about as many weights as their layers, or more.
    """

    body: QuantizedFormat
    attention_output: QuantizedFormat | None
    feed_forward_output: QuantizedFormat
    head: QuantizedFormat
    small: Mode | None = None
    lexical: Mode | None = None

    def of_shape(self, embedding: Embedding, layers: int) -> Mode:
        """Return the mode for a model with such an embedding and number of layers."""
        if embedding.hidden_size >= SMALL_WIDTH:
            return self
        if self.lexical is not None and embedding.vocab_size >= _LAYER_WEIGHTS * layers * embedding.hidden_size:
            return self.lexical
        return self.small or self

    def format_of(self, k: int, place: Place) -> QuantizedFormat | None:
        """Return the format of a layer with k inputs, None if it is not quantized.

        Rotated groups are the largest that divide the inputs.
        """
        places = {
            "attention_output": self.attention_output,
            "feed_forward_output": self.feed_forward_output,
            "head": self.head,
            "small": None,
        }
        form = places.get(place, self.body)
        while form is not None and form.rotated and form.group > 32 and k % form.group:
            form = QuantizedFormat(form.bits, form.group // 2, rotated=True)
        return form


def _rotated(group: int) -> QuantizedFormat:
    return QuantizedFormat(8, group, rotated=True)


def _affine(bits: int) -> QuantizedFormat:
    return QuantizedFormat(bits, 32, scales="super", mins=True)


def _mode(
    body: QuantizedFormat, head: QuantizedFormat, *, small: Mode | None = None, lexical: Mode | None = None
) -> Mode:
    """Return a mode whose layers have one format, whatever their place, but for the head."""
    return Mode(body, body, body, head, small, lexical)


ALL_LAYERS = _mode(_rotated(32), _rotated(32))
"""A mode that quantizes every layer that some mode quantizes."""

MODES = {
    "int8": _mode(
        _rotated(128),
        _rotated(32),
        small=ALL_LAYERS,
        lexical=replace(ALL_LAYERS, attention_output=None),
    ),
    "int4": replace(
        _mode(_affine(4), _affine(6), small=_mode(_affine(5), _affine(6)), lexical=_mode(_affine(6), _affine(6))),
        feed_forward_output=_affine(5),
    ),
}
"""Modes by the names of `--quantization`."""

NAMES = (*MODES, *METHODS)
"""Values of `--quantization`; a method only confirms how the checkpoint is quantized."""


@dataclass(frozen=True)
class Quantization:
    """Formats of a model's weights. With neither `mode` nor `scheme`, none is quantized.

    `lent`: matrices of another model that have these weights. `in_floats`: no other matrix is quantized.
    """

    checkpoint: Checkpoint
    mode: Mode | None = None
    scheme: Scheme | None = None
    lent: Mapping[str, Matrix] = field(default_factory=dict)
    in_floats: bool = False

    def of_head(self, layer: Linear, lent: Mapping[str, Matrix]) -> Quantization:
        """Return the formats of a draft head with this layer, to which a model has lent matrices.

        Quantized checkpoints may have a head in floats though their config says otherwise: what quantized them did not
        know of it.
        """
        is_said = self.scheme is not None and self.scheme.format_of(_module(layer.weight)) is not None
        return replace(self, lent=lent, in_floats=is_said and self.checkpoint.has_floats(layer.weight))

    def format_of(self, layers: Sequence[Linear], k: int, place: Place = "body") -> QuantizedFormat | None:
        """Return the format of linear layers that share their k inputs, None if they are not quantized."""
        if place == "router":
            return None
        if layers[0].weight in self.lent:
            return self.lent[layers[0].weight].quantized
        if self.scheme is None:
            return None if self.mode is None else self.mode.format_of(k, place)
        if (
            self.in_floats or layers[0].tensor_inputs
        ):  # schemes can't read a part of the inputs, and published draft heads have floats
            return None
        formats = [self.scheme.format_of(_module(layer.weight)) for layer in layers]
        _check_alike(layers, [form == formats[0] for form in formats], "formats")
        return formats[0]

    def of_shape(self, embedding: Embedding, layers: int) -> Quantization:
        """Return the formats of a model with such an embedding and number of layers."""
        return self if self.mode is None else replace(self, mode=self.mode.of_shape(embedding, layers))

    def format_of_embedding(self, weight: str, k: int) -> QuantizedFormat | None:
        """Return the format of an embedding [vocabulary, k] that is not the head as well."""
        if weight in self.lent:
            return self.lent[weight].quantized
        if self.scheme is None:
            return None if self.mode is None else self.mode.format_of(k, "body")
        return self.scheme.format_of(_module(weight))

    def order_of(self, layers: Sequence[Linear], k: int) -> Order | None:
        """Return the order in which the layers' weights take their inputs, i32 [k]; None for the natural order."""
        if self.scheme is None or self.format_of(layers, k) is None:
            return None
        orders = [
            self.scheme.order(self.checkpoint, _module(layer.weight), layer.tensor_outputs or layer.outputs, k)
            for layer in layers
        ]
        _check_alike(layers, [_same(order, orders[0]) for order in orders], "orders of inputs")
        return orders[0]

    def read(self, part: MatrixPart) -> QuantizedMatrix:
        """Read `part` from a quantized checkpoint."""
        if self.scheme is None:
            raise ValueError("the checkpoint is not quantized")
        return self.scheme.read(self.checkpoint, _module(part.tensor), part.whole_n, part.k).rows(part.first, part.n)

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the weights `name` of this shape as floats, of a quantized layer the values that it stands for."""
        if self.scheme is None or self.checkpoint.has_floats(name) or self.scheme.format_of(_module(name)) is None:
            return self.checkpoint.get(name, shape)
        n, k = shape
        return self.scheme.dequantized(self.checkpoint, _module(name), n, k)

    def blocks(self, part: MatrixPart) -> GgufMatrix | Mxfp4Matrix | None:
        """Return the matrix of which `part` is rows, if it is in blocks that are packed as they are."""
        if self.scheme is None:
            return None
        return self.scheme.blocks(self.checkpoint, _module(part.tensor), part.whole_n, part.k)

    def check(self, part: MatrixPart) -> None:
        """Raise ModelError if the checkpoint lacks a tensor that the quantized `part` needs."""
        if self.scheme is not None:
            self.scheme.check(self.checkpoint, _module(part.tensor), part.whole_n, part.k)
        else:
            self.checkpoint.get(part.tensor, part.shape)


def counts_by_importance(form: QuantizedFormat | None) -> bool:
    """Return True if weights are quantized to the format with errors that count by the importance of their inputs."""
    return form is not None and form.mins and form.scales == "super" and not form.rotated


def choose_quantization(name: str | None, checkpoint: Checkpoint, config: ModelConfig) -> Quantization:
    """Return the formats of a checkpoint's weights for the option `name`. Raises ModelError if they do not fit."""
    scheme = scheme_of(config)
    if name is not None and name not in NAMES:
        raise ModelError(f"quantization is {name!r}; it must be one of {', '.join(NAMES)}")
    own = None if scheme is None else scheme.method
    if own is not None and name not in (None, own):
        raise ModelError(f"quantization is {name!r}, but the checkpoint is quantized by {own} already; leave it out")
    if own is None and name in METHODS:
        raise ModelError(
            f"quantization is {name!r}, but the checkpoint is not quantized; choose one of {', '.join(MODES)}"
        )
    return Quantization(checkpoint, MODES.get(name or ""), scheme)


def _module(weight: str) -> str:
    return weight.removesuffix(".weight")


def _same(left: Order | None, right: Order | None) -> bool:
    return left is right if left is None or right is None else np.array_equal(left, right)


def _check_alike(layers: Sequence[Linear], alike: Sequence[bool], what: str) -> None:
    """Raise ModelError that names the first layer that is not like the first one."""
    if not all(alike):
        other = layers[alike.index(False)].weight
        raise ModelError(
            f"{layers[0].weight} and {other} share their input, and must be quantized alike; their {what} differ in "
            "this checkpoint"
        )
