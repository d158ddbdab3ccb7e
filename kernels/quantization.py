"""Which weights are integers: chosen at load, for float checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.emit.layout import IntegerFormat


@dataclass(frozen=True)
class Quantization:
    """The formats of a model's weights: of all linear layers, and of the head (with the embedding that it may share).

    None stands for floats. `ordered`: the checkpoint keeps the inputs of its layers in an order of its own.
    """

    layers: IntegerFormat | None = None
    head: IntegerFormat | None = None
    ordered: bool = False

    def format_of(self, weight: str) -> IntegerFormat | None:
        """The format of the tensor `weight` of a linear layer."""
        return self.layers


NONE = Quantization()

_HEAD = IntegerFormat(8)

MODES = {
    "int8": Quantization(IntegerFormat(8), _HEAD),
    "int4": Quantization(IntegerFormat(4, 128), _HEAD),
    "int4-g64": Quantization(IntegerFormat(4, 64), _HEAD),
    "int4-g32": Quantization(IntegerFormat(4, 32), _HEAD),
}
"""By the names of `--quantization`."""

METHODS = ("gptq", "awq", "compressed-tensors")
"""Of checkpoints that are quantized already, by the names of `quant_method`."""
