"""Which of a model's weights are integers: as chosen for a checkpoint of floats, or as a checkpoint has them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.kernels.config import ModelConfig
from quire.kernels.emit.layout import IntegerFormat
from quire.kernels.errors import ModelError
from quire.kernels.operands import Linear, Part
from quire.kernels.weights.checkpoint import Checkpoint
from quire.kernels.weights.quantized import METHODS, IntegerMatrix, Scheme, scheme_of

Order = npt.NDArray[np.int32]

HEAD_GROUP = 32
"""Of the head, and of the embedding that it may share, in modes with groups: its errors cost the most."""

MODES = {
    "int8": IntegerFormat(8),
    "int4": IntegerFormat(4, 128),
    "int4-g64": IntegerFormat(4, 64),
    "int4-g32": IntegerFormat(4, 32),
}
"""Formats of the linear layers by the names of `--quantization`."""

NAMES = (*MODES, *METHODS)
"""What `--quantization` may say; a method only confirms what the checkpoint is."""


@dataclass(frozen=True)
class Quantization:
    """The formats of a model's weights. With neither `mode` nor `scheme`, all are floats."""

    checkpoint: Checkpoint
    mode: IntegerFormat | None = None
    scheme: Scheme | None = None

    def format_of(self, linear: Linear) -> IntegerFormat | None:
        """The format of a linear layer's weights, None for floats."""
        if self.scheme is None:
            if linear.head and self.mode is not None and self.mode.group:
                return IntegerFormat(self.mode.bits, HEAD_GROUP, self.mode.zeros)
            return self.mode
        formats = {self.scheme.format_of(_module(weight)) for weight, _, _ in linear.tensors}
        if len(formats) > 1:
            raise _unlike(linear, "formats")
        return formats.pop()

    def order_of(self, linear: Linear, k: int) -> Order | None:
        """The order in which a linear layer's weights take their inputs, i32 [k]; None for their natural order."""
        if self.scheme is None or self.format_of(linear) is None:
            return None
        orders = [self.scheme.order(self.checkpoint, _module(weight), n, k) for weight, _, n in linear.tensors]
        if any(not _same(order, orders[0]) for order in orders):
            raise _unlike(linear, "orders of inputs")
        return orders[0]

    def read(self, part: Part) -> IntegerMatrix:
        """The integers of `part` in a quantized checkpoint."""
        if self.scheme is None:
            raise ValueError("the checkpoint is not quantized")
        return self.scheme.read(self.checkpoint, _module(part.tensor), part.n, part.k)

    def check(self, part: Part) -> None:
        """Raises ModelError when the checkpoint lacks what the integers of `part` need."""
        if self.scheme is not None:
            self.scheme.check(self.checkpoint, _module(part.tensor), part.n, part.k)
        else:
            self.checkpoint.get(part.tensor, part.shape)


def choose_quantization(name: str | None, checkpoint: Checkpoint, config: ModelConfig) -> Quantization:
    """The formats of a checkpoint's weights when `name` was asked for. Raises ModelError when it can't be had."""
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


def _unlike(linear: Linear, what: str) -> ModelError:
    names = ", ".join(weight for weight, _, _ in linear.tensors)
    return ModelError(f"{names} share their input, and must be quantized alike; their {what} differ in this checkpoint")
