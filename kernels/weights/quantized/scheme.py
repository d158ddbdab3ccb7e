"""Matrices of integers, and what every way of storing them in a checkpoint has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from quire.kernels.emit.layout import IntegerFormat
from quire.kernels.errors import ModelError
from quire.kernels.weights.checkpoint import Checkpoint, Tensor

T = TypeVar("T")

BITS = (4, 8)
GROUPS = (32, 64, 128)
WHOLE_ROW = -1
"""What checkpoints write for a group that spans the whole row."""


@dataclass(frozen=True)
class IntegerMatrix:
    """A matrix w[n, k] = (values - zeros) * scales.

    `values` is u8 [n, k], 0 to 15 or 255. `scales` is f32 [n, groups], `zeros` u8 [n, groups], or None where the format
    has none. Column j of values belongs to input `order[j]`, i32 [k]; None means j itself. All are contiguous; values
    may be the mapped file itself.
    """

    format: IntegerFormat
    values: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    zeros: npt.NDArray[np.uint8] | None
    order: npt.NDArray[np.int32] | None


class Scheme(ABC):
    """Which modules of a model are quantized, and how their integers lie in the checkpoint.

    A module is named as in the checkpoint, `model.layers.0.self_attn.q_proj`; only linear layers are asked for.
    """

    method: ClassVar[str]
    """`quant_method` in config.json."""

    @abstractmethod
    def format_of(self, module: str) -> IntegerFormat | None:
        """How the module is stored, None where it is left in floats."""

    @abstractmethod
    def _tensors(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> dict[str, Tensor]:
        """The tensors of a quantized module by the last part of their names, once names, types and shapes are right."""

    @abstractmethod
    def read(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> IntegerMatrix:
        """The matrix of a quantized module of `n` outputs and `k` inputs. Raises ModelError as `check` does."""

    @abstractmethod
    def order(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> npt.NDArray[np.int32] | None:
        """`order` of the matrix that `read` gives, without reading the matrix."""

    def check(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> None:
        """Raises ModelError naming the first tensor of a quantized module that is missing, mistyped or misshapen."""
        self._tensors(checkpoint, module, n, k)


def quantized(module: str, layer: T | None) -> T:
    """`layer`, which is None only if the caller asks for the integers of a module left in floats."""
    if layer is None:
        raise ValueError(f"{module} is not quantized")
    return layer


def in_block(module: str) -> bool:
    """Whether the module belongs to one of the numbered blocks of the model, as all do but embeddings and the head."""
    return any(part.isdigit() for part in module.split("."))


def order_of(indices: Tensor, group: int) -> npt.NDArray[np.int32] | None:
    """The order of columns in which groups are contiguous, i32 [k], from each column's group; None if they are."""
    given = indices.to_numpy().astype(np.int32)
    natural = np.arange(len(given), dtype=np.int32) // (group or max(len(given), 1))
    if np.array_equal(given, natural):
        return None
    order = np.argsort(given, kind="stable").astype(np.int32)
    if not np.array_equal(given[order], natural):
        raise ModelError(
            f"tensor {indices.name} must name each of the groups 0 to {natural[-1]} "
            f"for {group or len(given)} inputs, but it doesn't"
        )
    return order
