"""Tensors of mixtures of experts by one name for each expert, whatever the checkpoint calls or stacks them.

The graph names the layers of expert E `mlp.experts.E.gate_proj`, `up_proj` and `down_proj`, and the router `mlp.gate`,
as the checkpoints of Qwen and OLMoE do; and what is added to the scores `mlp.gate.e_score_correction_bias`, as those of
DeepSeek do. Mixtral's, MiniMax's and ERNIE's have other names, and ERNIE's correction is a matrix of one row. Other
checkpoints stack the experts: `gate_up_proj` [experts, 2 * inner, hidden], gates first, and `down_proj` [experts,
hidden, inner]; or as gpt-oss does, with biases `gate_up_proj_bias` and `down_proj_bias`, transposed, and with gates and
ups in turns.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.kernels.weights.tensor import Tensor

_ROUTER = re.compile(r"(?P<block>.*\.)mlp\.gate(?P<end>\.\w+)")
_EXPERT = re.compile(r"(?P<block>.*\.)mlp\.experts\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj(?P<end>\.\w+)")
_CORRECTION = re.compile(r"(?P<block>.*\.)mlp\.gate\.e_score_correction_bias")
_STACKS = {  # of gates and ups, and of downs
    True: ("mlp.experts.gate_up_proj", "feed_forward.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
    False: ("mlp.experts.down_proj", "feed_forward.experts.down_proj", "block_sparse_moe.output_linear.weight"),
}
_MIXTRAL = {"gate": "w1", "down": "w2", "up": "w3"}
_BLOCK_ROWS = 64  # rows that are transposed at once, so that they stay in the cache


@dataclass(frozen=True)
class TransposedTensor(Tensor):
    """Every `step`-th column of a stored matrix, from number `first` on, as rows; `data` is a copy."""

    first: int
    step: int

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The bytes of the transpose."""
        rows, columns = (*self.shape, 1)[:2]
        elements = self.stored.view(f"<u{len(self.stored) // (self.step * rows * columns)}")
        chosen = elements.reshape(columns, -1)[:, self.first :: self.step]
        out = np.empty((rows, columns), elements.dtype)
        for row in range(0, columns, _BLOCK_ROWS):
            out[:, row : row + _BLOCK_ROWS] = chosen[row : row + _BLOCK_ROWS].T
        return out.reshape(-1).view(np.uint8)


def other_names(name: str) -> tuple[str, ...]:
    """Return the other names that checkpoints have for a tensor of a router or an expert."""
    router, expert, correction = (pattern.fullmatch(name) for pattern in (_ROUTER, _EXPERT, _CORRECTION))
    if correction:
        block = correction["block"]
        return f"{block}block_sparse_moe.e_score_correction_bias", f"{block}mlp.e_score_correction_bias"
    if router:
        places = "block_sparse_moe.gate", "mlp.router", "feed_forward.gate", "block_sparse_moe.router.layer"
        return tuple(f"{router['block']}{place}{router['end']}" for place in places)
    if expert:
        number, layer = expert["expert"], _MIXTRAL[expert["part"]]
        return tuple(
            f"{expert['block']}{module}.experts.{number}.{layer}{expert['end']}"
            for module in ("block_sparse_moe", "feed_forward")
        )
    return ()


def find_correction(name: str, find: Callable[[str], Tensor | str | None]) -> Tensor | str | None:
    """Return the correction of scores that is stored as a matrix of one row, or only its dtype if not supported."""
    match = _CORRECTION.fullmatch(name)
    found = None if match is None else find(f"{match['block']}mlp.moe_statics.e_score_correction_bias")
    if isinstance(found, Tensor) and found.shape[:-1] == (1,):
        return Tensor(name, found.format, found.shape[1:], found.stored)
    return found


def find_expert(name: str, find: Callable[[str], Tensor | str | None]) -> Tensor | str | None:
    """Return an expert's part of a stacked tensor, or only the dtype of a tensor whose dtype is not supported."""
    match = _EXPERT.fullmatch(name)
    if match is None or match["end"] not in (".weight", ".bias"):
        return None
    is_fused = match["part"] != "down"
    names = (f"{match['block']}{stack}" for stack in _STACKS[is_fused])
    stacked = next((name for name in names if find(name) is not None), "")
    biases, found = find(f"{stacked}_bias"), find(stacked)
    if match["end"] == ".bias":
        found = biases
    if not isinstance(found, Tensor):
        return found
    number, parts, rank = int(match["expert"]), 2 if is_fused else 1, 2 if match["end"] == ".bias" else 3
    if len(found.shape) != rank or number >= found.shape[0]:
        return None
    (length, *others), chosen = found.shape[1:], int(match["part"] == "up")
    stored = found.stored.reshape(found.shape[0], -1)[number]
    if biases is None:
        half = stored.reshape(parts, -1)[chosen]
        return Tensor(name, found.format, (length // parts, *others), half)
    shape = (others[0] // parts, length) if others else (length // parts,)  # as in gpt-oss
    return TransposedTensor(name, found.format, shape, stored, chosen, parts)
