"""Checkpoints whose linear layers are stored as integers, one file for each method of storing them."""

from __future__ import annotations

from collections.abc import Callable

from quire.kernels.config import ModelConfig
from quire.kernels.emit.layout import IntegerFormat
from quire.kernels.errors import ModelError
from quire.kernels.weights.quantized.awq import Awq
from quire.kernels.weights.quantized.compressed import CompressedTensors
from quire.kernels.weights.quantized.gptq import Gptq
from quire.kernels.weights.quantized.scheme import IntegerMatrix, Scheme

__all__ = ["METHODS", "IntegerFormat", "IntegerMatrix", "Scheme", "scheme_of"]

METHODS: dict[str, Callable[[ModelConfig], Scheme]] = {
    "gptq": Gptq.from_config,
    "awq": Awq.from_config,
    "compressed-tensors": CompressedTensors.from_config,
}
"""By `quant_method` in config.json's `quantization_config`."""


def scheme_of(config: ModelConfig) -> Scheme | None:
    """How the model of `config` is quantized, None if it isn't. Raises ModelError for what can't be read."""
    fields = ("quantization_config", "compression_config")  # the second is an older name
    name = next((name for name in fields if config.options(name)), None)
    if name is None:
        return None
    section = config.section(name)
    method = section.fields.get("quant_method")
    read = METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        raise ModelError(
            f"config.json: {name}.quant_method is {method!r}; supported are gptq and compressed-tensors "
            "with integers of 4 or 8 bits, and awq with 4 bits"
        )
    return read(section)
