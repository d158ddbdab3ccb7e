"""Loading of a checkpoint's tensors into the memory that kernels read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from quire.kernels._native import MatrixView, PackedWeights, QuantizedWeights, Runner
from quire.kernels.emit.layout import Dtypes, QuantizedFormat
from quire.kernels.errors import ModelError
from quire.kernels.operands import Matrix, MatrixPart, Operand, Weight
from quire.kernels.weights.checkpoint import Checkpoint
from quire.kernels.weights.quantization import Quantization
from quire.kernels.weights.weight_cache import PackedFile, open_packed


def check(quantization: Quantization, weights: list[Weight]) -> None:
    """Raise ModelError for the first tensor that the checkpoint lacks or has in another shape."""
    checkpoint = quantization.checkpoint
    for weight in weights:
        if isinstance(weight, Matrix):
            for part in weight.parts:
                if weight.quantized is None:
                    checkpoint.get(part.tensor, part.shape)
                else:
                    quantization.check(part)
        else:
            for name, shape in weight.tensors.items():
                checkpoint.get(name, shape)


@dataclass
class Loader:
    """Packs weights into a runner's memory, or matrices into a file of the weight cache in `cache_folder`.

    `progress(task, done, total)` counts bytes. The matrices of a file live as long as `packed`.
    """

    runner: Runner
    quantization: Quantization
    dtypes: Dtypes
    progress: Callable[[str, int, int], None] | None = None
    cache_folder: str | None = None
    packed: PackedFile | None = None
    addresses: dict[Operand, int] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Checkpoint:
        """Source of the weights."""
        return self.quantization.checkpoint

    def load(self, weights: list[Weight]) -> None:
        """Load the weights and store their addresses in `addresses`."""
        matrices = [w for w in weights if isinstance(w, Matrix)]
        if self.cache_folder is not None:
            self.packed = open_packed(self.cache_folder, self.quantization, matrices, self.dtypes)
        try:
            self._place_all(weights, sum(matrix.bytes(self.dtypes) for matrix in matrices))
        except BaseException:
            if self.packed is not None:
                self.packed.discard()
            raise
        if self.packed is not None:
            self.packed.commit()

    def _place_all(self, weights: list[Weight], total: int) -> None:
        done = 0
        for weight in weights:
            if not isinstance(weight, Matrix):
                self.addresses[weight] = self.runner.upload(weight.values(self.checkpoint))
            else:
                self.addresses[weight] = self._pack(weight)
                done += weight.bytes(self.dtypes)
                self.checkpoint.drop_pages()
                if self.progress is not None:
                    self.progress("loading weights", done, total)

    def _pack(self, matrix: Matrix) -> int:
        if self.packed is None:
            target = self.runner.allocate_by_node(matrix.bytes(self.dtypes))
        else:
            target = self.packed.addresses[matrix]
            if not self.packed.is_new:
                return target
        for part in matrix.parts:
            if matrix.quantized is None:
                packed = PackedWeights(target, self.dtypes.weights, matrix.k)
                self.runner.pack(self._view(part), packed, part.first_tile, part.tile_step)
                continue
            try:
                self._pack_quantized(target, part, matrix.quantized)
            except ValueError as error:
                raise ModelError(f"tensor {part.tensor} can't be packed: {error}") from None
        return target

    def _view(self, part: MatrixPart) -> MatrixView:
        """Return the part's tensor in the checkpoint."""
        tensor = self.checkpoint.get(part.tensor, part.shape)
        return MatrixView(tensor.address, tensor.format, part.n, part.k, *part.strides)

    def _pack_quantized(self, target: int, part: MatrixPart, form: QuantizedFormat) -> None:
        packed = QuantizedWeights(target, form, part.k)
        if self.quantization.scheme is None:
            self.runner.quantize(self._view(part), packed, part.first_tile, part.tile_step)
            return
        read = self.quantization.read(part)
        zeros = None if read.zeros is None else read.zeros.astype(np.int16)
        self.runner.pack_quantized(read.values, read.scales, zeros, packed, part.first_tile, part.tile_step)
