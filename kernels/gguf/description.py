"""The description of a GGUF file for people: the name of its quantization, and the number of its parameters."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from quire.kernels.gguf.container import GgufModel

DESCRIPTION = "gguf.json"
"""File of a model folder that has the description."""

_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 21: "Q2_K_S", 25: "IQ4_NL",
    30: "IQ4_XS", 32: "BF16", 38: "MXFP4_MOE",
}  # fmt: skip
"""Names of `general.file_type`, llama.cpp's number of the mix of types."""


def description_of(model: GgufModel) -> dict[str, Any]:
    """Return the type, by `general.file_type` or else that of most of the parameters, and their number."""
    sizes: Counter[str] = Counter()
    for tensor in model.tensors.values():
        sizes[tensor.type] += math.prod(tensor.shape)
    given = model.metadata.get("general.file_type")
    named = _FILE_TYPES.get(given) if type(given) is int else None
    return {"file_type": named or max(sizes, key=sizes.__getitem__, default=""), "num_parameters": sizes.total()}
