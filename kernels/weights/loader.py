"""Loading of a checkpoint's tensors into the memory that kernels read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.kernels._native import Device, MatrixBuffer, MatrixView, PackedWeights, QuantizedWeights
from quire.kernels.emit.layout import TILE_ROWS, Dtypes, QuantizedFormat
from quire.kernels.errors import ModelError
from quire.kernels.operands import Array, ArrayWeight, Matrix, MatrixPart, Operand, Weight
from quire.kernels.weights.checkpoint import FLOAT_DTYPES, Checkpoint, Tensor
from quire.kernels.weights.quantization import Quantization, counts_by_importance
from quire.kernels.weights.shared_weights import SharedWeights
from quire.kernels.weights.weight_cache import CacheFile, key_of

Importance = Mapping[tuple[str, int], npt.NDArray[np.float32]]
"""How much the errors of the weights of each input count, by tensor and first column: f32 [k] of the columns read."""


class ImportanceTrial(Protocol):
    """A trial run of a float model that measures the importance of inputs; see trial.py."""

    @property
    def described(self) -> str:
        """All that the importance depends on besides the checkpoint."""

    def run(self) -> Importance:
        """Return the importance of the inputs of all linear layers. Raises ModelError."""


_PIECE_BYTES = 16 << 20
"""Most bytes of a float matrix, as f32, that are read at once."""


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
    """Packs weights into a device's memory, or reads them from the weight cache in `cache_folder`.

    `progress(task, done, total)` counts bytes. `trial` measures the importance of inputs for the formats that weigh
    errors by it. `shared` is memory of other engines too, which may hold the weights already.
    """

    device: Device
    quantization: Quantization
    dtypes: Dtypes
    progress: Callable[[str, int, int], None] | None = None
    cache_folder: str | None = None
    trial: ImportanceTrial | None = None
    shared: SharedWeights | None = None
    addresses: dict[Operand, int] = field(default_factory=dict)
    _importance: Importance = field(default_factory=dict)
    _read: tuple[tuple[str, tuple[int, ...]], Tensor, npt.NDArray[np.uint8]] | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """Source of the weights."""
        return self.quantization.checkpoint

    def load(self, weights: list[Weight]) -> None:
        """Load the weights and store their addresses in `addresses`."""
        if self.shared is None:
            self._fill(weights)
        else:
            self._load_shared(self.shared, weights)
        self.checkpoint.drop_pages()
        self.trial, self._importance = None, {}  # they hold the graph and much else

    def _load_shared(self, shared: SharedWeights, weights: list[Weight]) -> None:
        """Load the weights, those that can be shared into shared memory unless they are there."""
        self.addresses |= shared.map(self.device)
        if shared.is_complete:
            self._fill([weight for weight in weights if weight not in self.addresses])
        else:
            self._fill(weights)
            shared.complete(self.device)

    def _fill(self, weights: list[Weight]) -> None:
        """Load the weights into the memory that they have, or else into new memory."""
        self.upload(weights)
        matrices = [weight for weight in weights if isinstance(weight, Matrix)]
        sizes = {matrix: matrix.bytes(self.dtypes) for matrix in matrices}
        for matrix, size in sizes.items():
            if matrix in self.addresses:
                self.device.place_matrix(self.addresses[matrix], size)
            else:
                self.addresses[matrix] = self.device.allocate_matrix(size)
        if matrices:
            self._pack_or_read(sizes)

    def _pack_or_read(self, sizes: Mapping[Matrix, int]) -> None:
        """Pack the matrices, or read them from the weight cache."""
        if self.cache_folder is None:
            self._pack_all(sizes)
            return
        key = packing_key(self.quantization, list(sizes), self.dtypes, self.trial)
        file = CacheFile(Path(self.cache_folder) / f"{key.hex()}.packed", key, self.device, self.addresses, sizes)
        file.load(lambda: self._pack_all(sizes), self._counter(sizes))

    def upload(self, weights: Iterable[Weight]) -> None:
        """Load those of the weights that are plain arrays."""
        for weight in weights:
            if isinstance(weight, Matrix):
                continue
            values = self._values(weight)
            if weight in self.addresses:
                self.device.write(self.addresses[weight], values)
            else:
                self.addresses[weight] = self.device.upload(values)

    def _counter(self, sizes: Mapping[Matrix, int]) -> Callable[[int], None]:
        """Return a function that shows progress, to be called with the bytes of each matrix that is done."""
        done, total = 0, sum(sizes.values())

        def count(size: int) -> None:
            nonlocal done
            done += size
            if self.progress is not None:
                self.progress("loading weights", done, total)

        return count

    def _values(self, weight: ArrayWeight) -> Array:
        values = weight.values(self.checkpoint)
        if not np.isfinite(values).all():
            raise ModelError(
                f"{self.checkpoint.folder}: {' or '.join(weight.tensors)} holds an infinity or a NaN; "
                "the checkpoint may be damaged"
            )
        return values

    def _pack_all(self, sizes: Mapping[Matrix, int]) -> None:
        """Pack the matrices, the largest first: what is read for it is in memory while little else is."""
        trial = _needed(self.trial, self.quantization, sizes)
        if trial is not None:
            self._importance = trial.run()
        count, buffer = self._counter(sizes), self.device.matrix_buffer()
        for matrix, size in sorted(sizes.items(), key=lambda item: -item[1]):
            self.pack(matrix, buffer)
            count(size)

    def pack(self, matrix: Matrix, buffer: MatrixBuffer) -> None:
        """Pack a matrix to its address, where memory must be zero, and release what was read for it."""
        target, unreleased = buffer.begin(self.addresses[matrix], matrix.bytes(self.dtypes)), 0
        for piece in (piece for part in matrix.parts for piece in self._pieces(matrix, part)):
            self._pack(matrix, piece, target)
            unreleased += 4 * piece.n * piece.k
            if unreleased >= _PIECE_BYTES:
                self.checkpoint.drop_pages()
                unreleased = 0
        buffer.end()
        self._read = None
        self.checkpoint.drop_pages()

    def _pieces(self, matrix: Matrix, part: MatrixPart) -> Iterator[MatrixPart]:
        """Yield the parts of a part that are read at once: the whole one where rows do not follow one another."""
        is_read = matrix.quantized is not None and self.quantization.scheme is not None
        if part.transposed or part.whole_k != part.k or (is_read and self.quantization.blocks(part) is None):
            return iter([part])
        return part.slices(max(TILE_ROWS, _PIECE_BYTES // (4 * part.k) // TILE_ROWS * TILE_ROWS))

    def _pack(self, matrix: Matrix, part: MatrixPart, target: int) -> None:
        try:
            if matrix.quantized is None:
                packed = PackedWeights(target, self.dtypes.weights, matrix.k)
                self.device.pack(self._view(part), packed, part.first_tile, part.tile_step)
            else:
                self._pack_quantized(target, part, matrix.quantized)
        except ModelError:
            raise
        except ValueError as error:
            rows = f", rows from {part.first} on," if part.first else ""
            raise ModelError(f"{self.checkpoint.folder}: tensor {part.tensor}{rows} can't be packed: {error}") from None

    def _view(self, part: MatrixPart) -> MatrixView:
        """Return the part's tensor in the checkpoint.

        Successive parts of one tensor that are not whole rows share its bytes, which may have to be computed.
        """
        if not part.transposed and part.whole_k == part.k:
            rows = self.checkpoint.get(part.tensor, part.shape).rows(part.first, part.n)
            return MatrixView(rows.data, rows.format, part.n, part.k, *part.strides)
        key = part.tensor, part.shape
        if self._read is None or self._read[0] != key:
            tensor = self.checkpoint.get(*key)
            self._read = key, tensor, tensor.data
        _, tensor, data = self._read
        start = part.start * FLOAT_DTYPES[tensor.dtype][1]
        return MatrixView(data[start:], tensor.format, part.n, part.k, *part.strides)

    def _pack_quantized(self, target: int, part: MatrixPart, form: QuantizedFormat) -> None:
        packed = QuantizedWeights(target, form, part.k)
        if self.quantization.scheme is None:
            importance = self._importance.get((part.tensor, part.first_k)) if counts_by_importance(form) else None
            self.device.quantize(self._view(part), packed, part.first_tile, part.tile_step, importance)
            return
        blocks = self.quantization.blocks(part)
        if blocks is not None:
            self.device.pack_blocks(blocks, packed, part.first, part.n, part.first_tile, part.tile_step)
            return
        read = self.quantization.read(part)
        zeros = None if read.zeros is None else read.zeros.astype(np.int16)
        self.device.pack_quantized(read.values, read.scales, zeros, packed, part.first_tile, part.tile_step)


def packing_key(
    quantization: Quantization, matrices: Sequence[Matrix], dtypes: Dtypes, trial: ImportanceTrial | None
) -> bytes:
    """Return a hash of all that the bytes of the packed matrices depend on."""
    needed = _needed(trial, quantization, matrices)
    return key_of(quantization, matrices, dtypes, "" if needed is None else needed.described)


def _needed(
    trial: ImportanceTrial | None, quantization: Quantization, matrices: Iterable[Matrix]
) -> ImportanceTrial | None:
    """Return the trial if the matrices are quantized by what it measures."""
    is_needed = any(counts_by_importance(matrix.quantized) for matrix in matrices)
    return trial if is_needed and quantization.scheme is None else None
