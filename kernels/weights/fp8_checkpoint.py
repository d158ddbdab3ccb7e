"""Checkpoint folders with FP8 weights, which are read as float tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.kernels.errors import ModelError
from quire.kernels.weights.checkpoint import FLOAT_DTYPES, Checkpoint, Tensor
from quire.kernels.weights.quantized.fp8 import Fp8

_DTYPE = "F8_E4M3"
_SCALES = ("_scale_inv", "_scale")


@dataclass(frozen=True)
class Fp8Tensor(Tensor):
    """A matrix of FP8 codes; `data` are its products with the scales, f32."""

    fp8: Fp8
    scales: npt.NDArray[np.float32]

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The bytes of the products."""
        return self.rows(0, self.shape[0]).stored

    def rows(self, first: int, count: int) -> Tensor:
        """See Tensor; only these rows are multiplied."""
        try:
            values = self.fp8.dequantize(self.stored.reshape(self.shape), self.scales, first, count)
        except ValueError as error:
            raise ModelError(f"tensor {self.name} can't be loaded: {error}") from None
        return Tensor(self.name, self.format, values.shape, values.reshape(-1).view(np.uint8))


class Fp8Checkpoint(Checkpoint):
    """A folder of safetensors whose config.json states an FP8 format."""

    def __init__(self, folder: str, fp8: Fp8) -> None:
        self._fp8 = fp8
        super().__init__(folder)

    def _get(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Tensor:
        """Return a tensor; codes are products when they are read."""
        found = self._find(name)
        if not isinstance(found, Tensor) or found.dtype != _DTYPE or dtypes != tuple(FLOAT_DTYPES) or len(shape) != 2:
            return super()._get(name, shape, dtypes)
        tensor = super()._get(name, shape, (_DTYPE,))
        given = (self._tensors.get(tensor.name + end) for end in _SCALES)
        scales = next((each for each in given if each is not None and each.dtype in FLOAT_DTYPES), None)
        if scales is None:
            names = " nor ".join(tensor.name + end for end in _SCALES)
            raise ModelError(
                f"{self.folder}: tensor {tensor.name} is of type {_DTYPE}, but there is neither {names} in a float type"
            )
        grid = self._fp8.scales(scales.name, scales.to_f32(), shape)
        return Fp8Tensor(tensor.name, "f32", shape, tensor.stored, self._fp8, grid)

    @property
    def formats(self) -> set[str]:
        """Dtypes of the float tensors; scales, which are f32 in models of bf16, do not count."""
        floats = (tensor for tensor in self._tensors.values() if not tensor.name.endswith(_SCALES))
        return {tensor.format for tensor in floats if tensor.dtype in FLOAT_DTYPES}
