"""From a checkpoint's tensors to the memory that kernels read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.kernels._native import MatrixView, PackedWeights, QuantizedWeights, Runner
from quire.kernels.emit.layout import BLOCK, TILE_ROWS, IntegerFormat, Numbers, round_up
from quire.kernels.errors import ModelError
from quire.kernels.operands import Matrix, Part, Rows, Table, Vector
from quire.kernels.plan import PlanBuilder
from quire.kernels.weights.checkpoint import Checkpoint
from quire.kernels.weights.quantization import Quantization
from quire.kernels.weights.weight_cache import PackedFile, open_packed

Weight = Matrix | Vector | Rows | Table


def weights_of(plan: PlanBuilder) -> list[Weight]:
    """The distinct weights of a plan, in the order of their first use."""
    operands = (operand for launch in plan.launches for operand in launch.operands)
    return list(dict.fromkeys(o for o in operands if isinstance(o, Matrix | Vector | Rows | Table)))


def check(quantization: Quantization, weights: list[Weight]) -> None:
    """Raises ModelError for the first tensor that the checkpoint lacks or has in another shape."""
    checkpoint = quantization.checkpoint
    for weight in weights:
        if isinstance(weight, Matrix):
            for part in weight.parts:
                if weight.integers is None:
                    checkpoint.get(part.tensor, part.shape)
                else:
                    quantization.check(part)
        elif isinstance(weight, Vector):
            for name, size in zip(weight.tensors, weight.sizes, strict=True):
                checkpoint.get(name, (size,))
        elif isinstance(weight, Rows):
            checkpoint.get(weight.tensor, (weight.rows, weight.columns))


@dataclass
class Loader:
    """Packs weights into a runner's memory, or matrices into a file of the weight cache in `cache_folder`.

    `progress(what, done, total)` counts bytes. Matrices of a file live as long as `packed`.
    """

    runner: Runner
    quantization: Quantization
    numbers: Numbers
    progress: Callable[[str, int, int], None] | None = None
    cache_folder: str | None = None
    packed: PackedFile | None = None
    addresses: dict[Weight, int] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Checkpoint:
        """Where the weights come from."""
        return self.quantization.checkpoint

    def load(self, weights: list[Weight]) -> None:
        """Loads all; `addresses` then says where each is."""
        matrices = [w for w in weights if isinstance(w, Matrix)]
        if self.cache_folder is not None:
            self.packed = open_packed(self.cache_folder, self.quantization, matrices, self.numbers)
        try:
            self._place_all(weights, sum(matrix.bytes(self.numbers) for matrix in matrices))
        except BaseException:
            if self.packed is not None:
                self.packed.discard()
            raise
        if self.packed is not None:
            self.packed.commit()

    def _place_all(self, weights: list[Weight], total: int) -> None:
        done = 0
        for weight in weights:
            self.addresses[weight] = self._place(weight)
            if isinstance(weight, Matrix):
                done += weight.bytes(self.numbers)
                self.checkpoint.drop_pages()
                if self.progress is not None:
                    self.progress("loading weights", done, total)

    def _place(self, weight: Weight) -> int:
        if isinstance(weight, Matrix):
            return self._pack(weight)
        if isinstance(weight, Vector):
            return self.runner.upload(self._vector(weight))
        if isinstance(weight, Rows):
            tensor = self.checkpoint.get(weight.tensor, (weight.rows, weight.columns))
            return self.runner.upload(np.ascontiguousarray(tensor.to_f32()))
        return self.runner.upload(np.ascontiguousarray(weight.values))

    def _pack(self, matrix: Matrix) -> int:
        if self.packed is None:
            target = self.runner.allocate_by_node(matrix.bytes(self.numbers))
        else:
            target = self.packed.addresses[matrix]
            if not self.packed.is_new:
                return target
        for part in matrix.parts:
            if matrix.integers is None:
                packed = PackedWeights(target, self.numbers.weights, matrix.k)
                self.runner.pack(self._view(part), packed, part.first_tile, part.tile_step)
                continue
            try:
                self._pack_integers(target, part, matrix.integers)
            except ValueError as error:
                raise ModelError(f"tensor {part.tensor} can't be packed as integers: {error}") from None
        return target

    def _view(self, part: Part) -> MatrixView:
        """Return the part's tensor in the checkpoint."""
        tensor = self.checkpoint.get(part.tensor, part.shape)
        return MatrixView(tensor.address, tensor.format, part.n, part.k, *part.strides)

    def _pack_integers(self, target: int, part: Part, form: IntegerFormat) -> None:
        packed = QuantizedWeights(target, form, part.k)
        if self.quantization.scheme is None:
            self.runner.quantize(self._view(part), packed, part.first_tile, part.tile_step)
            return
        read = self.quantization.read(part)
        zeros = None if read.zeros is None else read.zeros.astype(np.int16)
        self.runner.pack_quantized(read.values, read.scales, zeros, packed, part.first_tile, part.tile_step)

    def _vector(self, vector: Vector) -> npt.NDArray[np.float32]:
        parts = [self.checkpoint.get(n, (s,)).to_f32() for n, s in zip(vector.tensors, vector.sizes, strict=True)]
        if vector.interleaved:
            width = round_up(vector.sizes[0], TILE_ROWS)
            padded = [np.pad(part, (0, width - len(part))).reshape(-1, TILE_ROWS) for part in parts]
            parts = [np.stack(padded, axis=1).reshape(-1)]
        values = np.concatenate(parts)
        return np.pad(values, (0, round_up(len(values), BLOCK) - len(values)))
