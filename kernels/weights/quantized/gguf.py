"""Quantized types of GGUF files, whose blocks are packed by native code as they are: nothing is rounded."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.kernels._native import GgufMatrix
from quire.kernels.config import ModelConfig
from quire.kernels.emit.layout import QuantizedFormat
from quire.kernels.errors import ModelError
from quire.kernels.gguf.parts import stacked_name
from quire.kernels.weights.checkpoint import Checkpoint, Tensor
from quire.kernels.weights.latent_tensors import dequantized
from quire.kernels.weights.quantized.scheme import Bytes, Floats, Layer, Scheme

TYPES = (
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
)  # fmt: skip
"""Types that can be loaded."""


@dataclass(frozen=True)
class Gguf(Scheme):
    """GGUF scheme. `types` are those of the modules that are not float; `*` is the number of any expert."""

    method = "gguf"

    types: dict[str, str] = field(hash=False)

    @classmethod
    def from_config(cls, section: ModelConfig) -> Gguf:
        """Read `quantization_config`, as `quire.kernels.gguf.config` writes it."""
        types = section.options("types")
        for module, kind in types.items():
            if kind not in TYPES:
                raise ModelError(
                    f"the GGUF file has {module} in type {kind}; supported are F32, F16, BF16, {', '.join(TYPES)}: "
                    "choose a file of such a type, or quantize it again with `llama-quantize --pure`"
                )
        return cls(types)

    def _layer(self, module: str) -> Layer | None:
        kind = self._type(module)
        return None if kind is None else Layer(QuantizedFormat.of_gguf(kind))

    def _type(self, module: str) -> str | None:
        stacked = stacked_name(f"{module}.weight")
        return self.types.get(module if stacked is None else stacked[0].removesuffix(".weight"))

    def _tensors(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> dict[str, Tensor]:
        return {"weight": checkpoint.get_integers(f"{module}.weight", (n, k), self._type(module) or "")}

    def blocks(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> GgufMatrix:
        """Return a module's matrix in its blocks."""
        tensor = self._tensors(checkpoint, module, n, k)["weight"]
        return GgufMatrix(tensor.stored, tensor.dtype, n, k, tensor.permuted_heads)

    def dequantized(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> Tensor:
        """See Scheme."""
        return dequantized(self._tensors(checkpoint, module, n, k)["weight"])

    def _unpack(self, tensors: dict[str, Tensor], layer: Layer, n: int, k: int) -> tuple[Bytes, Floats, Bytes | None]:
        raise ValueError("blocks of GGUF files are packed as they are")
