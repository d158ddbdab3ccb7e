"""Quantized checkpoints, one file for each method."""

from __future__ import annotations

from collections.abc import Callable

from quire.kernels.config import ModelConfig
from quire.kernels.emit.layout import QuantizedFormat
from quire.kernels.errors import ModelError
from quire.kernels.weights.quantized.awq import Awq
from quire.kernels.weights.quantized.compressed import CompressedTensors
from quire.kernels.weights.quantized.fp8 import METHODS as FP8_METHODS
from quire.kernels.weights.quantized.fp8 import is_fp8
from quire.kernels.weights.quantized.gguf import Gguf
from quire.kernels.weights.quantized.gptq import Gptq
from quire.kernels.weights.quantized.mxfp4 import Mxfp4
from quire.kernels.weights.quantized.scheme import QuantizedMatrix, Scheme

__all__ = ["METHODS", "QuantizedFormat", "QuantizedMatrix", "Scheme", "scheme_of"]

METHODS: dict[str, Callable[[ModelConfig], Scheme]] = {
    "gptq": Gptq.from_config,
    "awq": Awq.from_config,
    "compressed-tensors": CompressedTensors.from_config,
    "gguf": Gguf.from_config,
    "mxfp4": Mxfp4.from_config,
}
"""Readers by `quant_method` in config.json's `quantization_config`."""


def scheme_of(config: ModelConfig) -> Scheme | None:
    """Return the quantization scheme of a model, None if it has none. Raises ModelError for an unsupported one.

    FP8 has none: its weights are read as floats.
    """
    fields = ("quantization_config", "compression_config")  # the second is the older name
    name = next((name for name in fields if config.options(name)), None)
    if name is None:
        return None
    section = config.section(name)
    if is_fp8(section.fields):
        return None
    method = section.fields.get("quant_method")
    read = METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        raise ModelError(
            f"config.json: {name}.quant_method is {method!r}; supported are gptq and compressed-tensors "
            f"with integers of 4 or 8 bits, awq with 4 bits, mxfp4, and FP8 as compressed-tensors or "
            f"{', '.join(FP8_METHODS)}"
        )
    return read(section)
