"""Linear layers that are fused into one GEMM, and the kernels of norms: what lowerings share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.kernels.emit.rows import NormKernel
from quire.kernels.graph.operations import FeedForward, Linear, Norm
from quire.kernels.operands import Buffer, Operand, Vector
from quire.kernels.weights.quantization import Place


@dataclass(frozen=True)
class FusedLinear:
    """Linear layers that share their input, as one GEMM.

    The head computes the logits; a router chooses experts, or gates a shared one, and is never quantized. Of
    the other places see weights/quantization.py.
    """

    layers: tuple[Linear, ...]
    interleaved: bool = False
    place: Place = "body"

    @property
    def head(self) -> bool:
        """True of the layer that computes the logits."""
        return self.place == "head"

    @property
    def dim(self) -> str:
        """Dim that counts the rows of the input."""
        return "logit_rows" if self.head else "tokens"

    @property
    def outputs(self) -> int:
        """Number of outputs of all layers."""
        return sum(layer.outputs for layer in self.layers)

    @property
    def num_tensors(self) -> int:
        """Number of tensors of the checkpoint that the layers are, or are parts of."""
        return len({layer.weight for layer in self.layers})

    @property
    def biases(self) -> Vector:
        """Biases of all layers, in the order of the GEMM's columns."""
        names, sizes = tuple(layer.bias for layer in self.layers), tuple(layer.outputs for layer in self.layers)
        return Vector(names, sizes, self.interleaved)


def widening_of(operation: FeedForward) -> FusedLinear:
    """Return the layers of a feed-forward layer that read its input."""
    if operation.gate is None:
        return FusedLinear((operation.up,))
    return FusedLinear((operation.gate, operation.up), interleaved=True)


def norm_kernel(
    name: str, norm: Norm | None, width: int, source: Buffer, out: Buffer
) -> tuple[NormKernel, list[Operand]]:
    """Return the kernel of a norm, or of a conversion without a norm, and its operands."""
    if norm is None:
        return NormKernel(name, width, 0.0, "none"), [source, out]
    kind: Literal["rms", "layer"] = "layer" if norm.center else "rms"
    operands: list[Operand] = [source, Vector((norm.weight,), (width,), offset=norm.weight_offset), out]
    if norm.bias:
        operands.append(Vector((norm.bias,), (width,)))
    return NormKernel(name, width, norm.epsilon, kind, bool(norm.bias)), operands
