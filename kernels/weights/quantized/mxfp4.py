"""MXFP4 checkpoints as OpenAI publishes gpt-oss: only the experts are quantized, those of a layer in stacked tensors.

`gate_up_proj_blocks` u8 [experts, 2 inner, hidden / 32, 16] has two codes in a byte, the first one in the low half, and
rows of gates and of ups in turns; `gate_up_proj_scales` u8 [experts, 2 inner, hidden / 32] are exponents of powers of
two. `down_proj_blocks` and `down_proj_scales` are alike. Source: OCP Microscaling Formats 1.0; transformers' mxfp4.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.kernels._native import Mxfp4Matrix
from quire.kernels.config import ModelConfig
from quire.kernels.emit.layout import QuantizedFormat
from quire.kernels.errors import ModelError
from quire.kernels.weights.checkpoint import Checkpoint, Tensor
from quire.kernels.weights.quantized.scheme import Bytes, Floats, Layer, Scheme

_EXPERT = re.compile(r"(?P<block>.*\.mlp\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj")
_GROUP, _GROUP_BYTES = 32, 16


@dataclass(frozen=True)
class Mxfp4(Scheme):
    """MXFP4 scheme: all experts, and nothing else, are quantized."""

    method = "mxfp4"

    @classmethod
    def from_config(cls, section: ModelConfig) -> Mxfp4:
        """Read `quantization_config`. Raises ModelError if it leaves experts in floats."""
        for name in section.strings("modules_to_not_convert"):
            if name.endswith(("mlp", "experts")):
                raise ModelError(
                    f"config.json: {section.path}modules_to_not_convert has {name[:80]!r}; only checkpoints whose "
                    "experts are all in MXFP4 are supported"
                )
        return cls()

    def _layer(self, module: str) -> Layer | None:
        return Layer(QuantizedFormat.of_gguf("MXFP4")) if _EXPERT.fullmatch(module) else None

    def _tensors(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> dict[str, Tensor]:
        match = _EXPERT.fullmatch(module)
        if match is None:
            raise ValueError(f"{module} is not quantized")
        if k % _GROUP:
            raise ModelError(f"{module} has {k} inputs; MXFP4 needs a multiple of {_GROUP}")
        experts = ModelConfig(checkpoint.config).size("num_local_experts")
        rows = n if match["part"] == "down" else 2 * n
        name = f"{match['block']}.{'down' if match['part'] == 'down' else 'gate_up'}_proj"
        shape = experts, rows, k // _GROUP
        return {
            "blocks": checkpoint.get_integers(f"{name}_blocks", (*shape, _GROUP_BYTES), "U8"),
            "scales": checkpoint.get_integers(f"{name}_scales", shape, "U8"),
        }

    def blocks(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> Mxfp4Matrix:
        """Return the matrix of an expert: every other row of the stacked tensor for gates and ups."""
        tensors, match = self._tensors(checkpoint, module, n, k), _EXPERT.fullmatch(module)
        if match is None:
            raise ValueError(f"{module} is not quantized")
        expert, step = int(match["expert"]), 1 if match["part"] == "down" else 2
        codes, scales = (
            tensors[name].stored.reshape(tensors[name].shape[0], step * n, -1)[expert] for name in ("blocks", "scales")
        )
        first = 1 if match["part"] == "up" else 0
        strides = step * codes.shape[1], step * scales.shape[1]
        return Mxfp4Matrix(codes[first:].reshape(-1), scales[first:].reshape(-1), n, k, *strides)

    def _unpack(self, tensors: dict[str, Tensor], layer: Layer, n: int, k: int) -> tuple[Bytes, Floats, Bytes | None]:
        raise ValueError("MXFP4 is packed as it is")
