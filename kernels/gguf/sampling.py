"""The sampling parameters of a GGUF file, by the names of generation_config.json.

Most files give none. What a file leaves out is a default of llama.cpp, for which such files are made and with which
they are tried: small models answer with noise when they sample from the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire.kernels.errors import ModelError
from quire.kernels.gguf.metadata import shortest_decimal

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}

_PREFIX = "general.sampling."
_PARAMETERS = {  # by the key: the name of the parameter, the lowest and the highest value
    "temp": ("temperature", 0.0, 1e6),
    "top_k": ("top_k", -math.inf, math.inf),
    "top_p": ("top_p", 1e-6, 1.0),
    "min_p": ("min_p", 0.0, 1.0),
    "penalty_repeat": ("repetition_penalty", 1e-6, 1e6),
}
_LARGEST_TOP_K = 1 << 31


def sampling_of(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling parameters of a file. Raises ModelError for one that is no number, or out of range."""
    found: dict[str, float] = dict(DEFAULTS)
    for key, (name, lowest, highest) in _PARAMETERS.items():
        value = metadata.get(_PREFIX + key)
        if value is None:
            continue
        if type(value) not in (int, float) or not lowest <= value <= highest or not math.isfinite(value):
            raise ModelError(
                f"the GGUF file has {repr(value)[:80]} as {_PREFIX}{key}; it must be a number from {lowest:g} to "
                f"{highest:g}"
            )
        found[name] = shortest_decimal(float(value))
    found["top_k"] = min(max(0, int(found["top_k"])), _LARGEST_TOP_K)  # from 0 down it means all tokens
    return found
