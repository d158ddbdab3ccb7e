"""Tensors of mixtures of experts by one name for each expert, whatever the checkpoint calls or stacks them.

The graph names the layers of expert E `mlp.experts.E.gate_proj`, `up_proj` and `down_proj`, and the router `mlp.gate`,
as the checkpoints of Qwen and OLMoE do, or without `mlp` where that is another layer beside them (Gemma 4). Mixtral's
have other names. Other checkpoints stack the experts: `gate_up_proj` [experts, 2 * inner, hidden], gates first, and
`down_proj` [experts, hidden, inner]; or as gpt-oss does, with biases `gate_up_proj_bias` and `down_proj_bias`,
transposed, and with gates and ups in turns.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.kernels.weights.tensor import Tensor

_ROUTER = re.compile(r"(?P<block>.*\.)mlp\.gate(?P<end>\.\w+)")
_EXPERT = re.compile(r"(?P<at>.*\.)experts\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj(?P<end>\.\w+)")
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
    router, expert = _ROUTER.fullmatch(name), _EXPERT.fullmatch(name)
    if router:
        return f"{router['block']}block_sparse_moe.gate{router['end']}", f"{router['block']}mlp.router{router['end']}"
    if expert:
        number, layer = expert["expert"], _MIXTRAL[expert["part"]]
        block = expert["at"].removesuffix("mlp.")
        return (f"{block}block_sparse_moe.experts.{number}.{layer}{expert['end']}",)
    return ()


def find_expert(name: str, find: Callable[[str], Tensor | str | None]) -> Tensor | str | None:
    """Return an expert's part of a stacked tensor, or only the dtype of a tensor whose dtype is not supported."""
    match = _EXPERT.fullmatch(name)
    if match is None or match["end"] not in (".weight", ".bias"):
        return None
    is_fused = match["part"] != "down"
    stacked = f"{match['at']}experts.{'gate_up' if is_fused else 'down'}_proj"
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
