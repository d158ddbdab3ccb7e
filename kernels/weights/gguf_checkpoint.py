"""Checkpoint folders whose weights are in a GGUF file, with the tensors under the names of a model folder."""

from __future__ import annotations

import hashlib
import mmap
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.kernels.errors import ModelError
from quire.kernels.gguf.container import GgufModel, read_gguf
from quire.kernels.gguf.kept_folders import hold
from quire.kernels.gguf.metadata import FLOAT_TYPES
from quire.kernels.gguf.parts import (
    COMBINING_LAYERS,
    DECAYS,
    LATENT_PARTS,
    RATE_LAYERS,
    TAPS,
    Part,
    parts_of,
    stacked_name,
)
from quire.kernels.weights.checkpoint import FLOAT_DTYPES, Checkpoint, Tensor, read_config
from quire.kernels.weights.fp8_checkpoint import Fp8Checkpoint
from quire.kernels.weights.latent_tensors import dequantized, latent_tensor
from quire.kernels.weights.quantized.fp8 import fp8_of

_SUFFIX = ".gguf"


@dataclass(frozen=True)
class PermutedTensor(Tensor):
    """A tensor of q or k whose rows are permuted within `heads`; `data` is a copy in the order of a model folder."""

    heads: int

    @property
    def permuted_heads(self) -> int:
        """See Tensor."""
        return self.heads

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The bytes with the rows in order."""
        return self.rows(0, self.shape[0]).data

    def rows(self, first: int, count: int) -> Tensor:
        """See Tensor: only these rows are copied."""
        numbers, dim = np.arange(first, first + count), self.shape[0] // self.heads
        head, half, pair = numbers // dim, numbers % dim // (dim // 2), numbers % (dim // 2)
        chosen = self.stored.reshape(self.shape[0], -1)[head * dim + 2 * pair + half]
        return Tensor(self.name, self.format, (count, *self.shape[1:]), chosen.reshape(-1))


@dataclass(frozen=True)
class OffsetTensor(Tensor):
    """A float tensor to whose values, stored as `stored_format`, an offset was added; `data` is an f32 copy without it.

    Adding it again gives the stored values: they are the sum of the offset and of f32.
    """

    stored_format: str
    offset: float

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The bytes of the values without the offset."""
        values = Tensor(self.name, self.stored_format, self.shape, self.stored).to_f32() - np.float32(self.offset)
        return values.reshape(-1).view(np.uint8)


@dataclass(frozen=True)
class RateTensor(Tensor):
    """A float tensor of rates of decay, of which a model folder has logarithms; `data` are these, an f32 copy.

    Stored as `stored_format`, the rates are below 0: -exp(x) of each logarithm x.
    """

    stored_format: str

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The bytes of the logarithms, rounded."""
        with np.errstate(divide="ignore", invalid="ignore"):  # of rates that are 0, or none
            return np.log(-self.decay_rates()).reshape(-1).view(np.uint8)

    def decay_rates(self) -> npt.NDArray[np.float32]:
        """See Tensor: the rates as they are stored."""
        return Tensor(self.name, self.stored_format, self.shape, self.stored).to_f32()


def open_checkpoint(folder: str) -> Checkpoint:
    """Return the checkpoint in a folder, of safetensors or GGUF files. Raises ModelError."""
    has_gguf = any(Path(folder).glob(f"*{_SUFFIX}")) and not any(Path(folder).glob("*.safetensors*"))
    if has_gguf:
        return GgufCheckpoint(folder)
    fp8 = fp8_of(read_config(Path(folder))) if Path(folder).is_dir() else None
    return Checkpoint(folder) if fp8 is None else Fp8Checkpoint(folder, fp8)


class GgufCheckpoint(Checkpoint):
    """A folder made by `quire.kernels.gguf.folder`. Tensors keep their types and blocks; `format` is the type."""

    _model: GgufModel

    def _open_all(self) -> None:
        hold(self.folder)
        self._model = read_gguf(sorted(self.folder.glob(f"*{_SUFFIX}")))
        self._maps = self._model.maps
        self._stacks: dict[str, Part] = {}  # of experts: there may be more of them than can be listed
        for part in parts_of(self._model):
            if part.name in self._tensors or part.name in self._stacks:
                raise ModelError(f"{self.folder}: there are two tensors {part.name} in the GGUF file; it is damaged")
            if part.data.ndim > 1:
                self._stacks[part.name] = part
            else:
                self._tensors[part.name] = _tensor(part)

    def _find(self, name: str) -> Tensor | str | None:
        if name.endswith(LATENT_PARTS[0]):
            module = name.removesuffix(LATENT_PARTS[0])
            return latent_tensor(name, *(self._tensors.get(module + part) for part in LATENT_PARTS))
        if name.endswith((*RATE_LAYERS, *COMBINING_LAYERS)) and name in self._tensors:
            return dequantized(self._tensors[name])
        if (stacked := stacked_name(name)) is None:
            return super()._find(name)
        part, number = self._stacks.get(stacked[0]), stacked[1]
        return None if part is None or number >= len(part.data) else _tensor(replace(part, data=part.data[number]))

    @property
    def formats(self) -> set[str]:
        """Dtypes of the float matrices; norms and convolutions are always f32."""
        tensors = [tensor for name, tensor in self._tensors.items() if not name.endswith(TAPS)]
        matrices = [tensor.format for tensor in tensors if len(tensor.shape) > 1]
        matrices += [part.type.lower() for part in self._stacks.values() if len(part.shape) > 1]
        return {name for name in matrices if name.upper() in FLOAT_DTYPES}

    def _stored(self) -> list[npt.NDArray[np.uint8]]:
        return [tensor.data for _, tensor in sorted(self._model.tensors.items())]

    def _header(self, path: Path, mapped: mmap.mmap) -> bytes:
        return hashlib.blake2b(mapped[: self._model.header_bytes[path]]).digest()


def _tensor(part: Part) -> Tensor:
    """Return a part as a tensor, whose data is as in a model folder when it is read."""
    name, kind = part.name, part.type.lower()
    if part.heads:
        return PermutedTensor(name, kind, part.shape, part.data, part.heads)
    if name.endswith(DECAYS) and part.type in FLOAT_TYPES:
        return RateTensor(name, "f32", part.shape, part.data, kind)
    if part.offset and part.type in FLOAT_TYPES:
        return OffsetTensor(name, "f32", part.shape, part.data, kind, part.offset)
    return Tensor(name, kind, part.shape, part.data)
