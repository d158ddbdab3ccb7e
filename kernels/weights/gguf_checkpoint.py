"""Checkpoint folders whose weights are in a GGUF file, with the tensors under the names of a model folder."""

from __future__ import annotations

import hashlib
import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.kernels.errors import ModelError
from quire.kernels.gguf.config import permuted_heads, tensor_name
from quire.kernels.gguf.container import GgufModel, read_gguf
from quire.kernels.gguf.kept_folders import hold
from quire.kernels.weights.checkpoint import FLOAT_DTYPES, Checkpoint, Tensor, read_config
from quire.kernels.weights.fp8_checkpoint import Fp8Checkpoint
from quire.kernels.weights.quantized.fp8 import fp8_of

_SUFFIX = ".gguf"


@dataclass(frozen=True)
class PermutedTensor(Tensor):
    """A matrix of q or k whose rows are permuted within `heads`; `data` is a copy in the order of a model folder."""

    heads: int

    @property
    def permuted_heads(self) -> int:
        """See Tensor."""
        return self.heads

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The bytes with the rows in order."""
        rows = self.stored.reshape(self.heads, self.shape[0] // self.heads // 2, 2, -1)
        return rows.swapaxes(1, 2).reshape(-1)


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
        for tensor in self._model.tensors.values():
            name = tensor_name(tensor.name)
            if name in self._tensors:
                raise ModelError(f"{self.folder}: there are two tensors {name} in the GGUF file; it is damaged")
            self._tensors[name] = Tensor(name, tensor.type.lower(), tensor.shape, tensor.data)

    def _get(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Tensor:
        """Return a tensor, with the rows of q and k in the order of a model folder when they are read."""
        tensor = super()._get(name, shape, dtypes)
        heads = permuted_heads(self._model.metadata, name)
        return PermutedTensor(tensor.name, tensor.format, shape, tensor.stored, heads) if heads else tensor

    @property
    def formats(self) -> set[str]:
        """Dtypes of the float matrices; norms are always f32."""
        matrices = (tensor for tensor in self._tensors.values() if len(tensor.shape) > 1)
        return {tensor.format for tensor in matrices if tensor.dtype in FLOAT_DTYPES}

    def _header(self, path: Path, mapped: mmap.mmap) -> bytes:
        return hashlib.blake2b(mapped[: self._model.header_bytes[path]]).digest()
