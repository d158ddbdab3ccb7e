"""Parts of a base model that adapters may change for the requests that ask for them, and for no others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from quire.kernels.adapted import HEAD, Adapted, AdaptedColumns, AdaptedEmbedding, products_of
from quire.kernels.adapters.adapter import Adapter
from quire.kernels.adapters.files import AdapterFile, StoredTensor
from quire.kernels.errors import MemoryShortageError, ModelError
from quire.kernels.weights.checkpoint import Checkpoint
from quire.kernels.weights.tensor import FLOAT_DTYPES, Tensor


@dataclass(frozen=True)
class Changeable:
    """Tensors of the base that may be changed, by the names that adapters have for them: linear `layers` by changes of
    low rank, `embeddings` by these too, `rows` of embeddings and heads may be replaced, and so may `biases`.

    All else must be as it is in the checkpoint: PEFT saves whole embeddings that it has not trained. `tied` is the
    tensor of a head whose weights are those of the embedding. `free_bytes` returns the memory that an adapter may
    take, where an element has `element_bytes` once it is packed; None for any. Those of
    the `head` of a classification may be changed in each way.
    """

    layers: frozenset[str]
    checkpoint: Checkpoint
    embeddings: frozenset[str] = frozenset()
    rows: frozenset[str] = frozenset()
    biases: frozenset[str] = frozenset()
    head: frozenset[str] = frozenset()
    tied: str = ""
    element_bytes: int = 4
    free_bytes: Callable[[], int] | None = None

    @property
    def whole(self) -> frozenset[str]:
        """The tensors that may be replaced."""
        return self.rows | self.biases | self.head

    def unchangeable_names(self, adapter: Adapter) -> list[str]:
        """Return the names of all that an adapter changes and may not."""
        return [
            *(adapter.layers.keys() - self.layers),
            *(adapter.embeddings.keys() - self.embeddings),
            *(adapter.replaced.keys() - self.whole),
            *(adapter.tokens.keys() - self.rows),
        ]

    def is_same(self, file: AdapterFile, tensor: StoredTensor, name: str) -> bool:
        """Return whether a tensor of a file has the values of the base's. It is read piece by piece, and not kept."""
        stored = self.tied if name == HEAD and self.tied else name
        if not self.checkpoint.has_floats(stored):
            return False
        base = self.checkpoint.get(stored, tensor.shape)
        if base.format == tensor.format:
            return all(np.array_equal(own, piece) for own, piece in _pieces(base, file, tensor))
        return all(
            np.array_equal(_floats(own, base.format), _floats(piece, tensor.format))
            for own, piece in _pieces(base, file, tensor)
        )

    def check_memory(self, file: AdapterFile, tensors: Iterable[StoredTensor], copied_bytes: int = 0) -> None:
        """Raise MemoryShortageError unless there is memory for tensors, as they are read and then packed.

        `copied_bytes` are those of copies that reading them needs meanwhile.
        """
        if self.free_bytes is None:
            return
        needed = copied_bytes + sum(tensor.num_bytes + prod(tensor.shape) * self.element_bytes for tensor in tensors)
        if needed > (free := self.free_bytes()):
            raise MemoryShortageError(
                f"{file.path}: its tensors take {needed} bytes of memory to read and pack, and {free} are free; free "
                "some, lower --max-loras, or give an adapter that changes less"
            )


def _pieces(base: Tensor, file: AdapterFile, tensor: StoredTensor) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield bytes of both tensors, those of the same elements at a time."""
    own, other = (FLOAT_DTYPES[format_.upper()][1] for format_ in (base.format, tensor.format))
    start = 0
    for piece in file.pieces(tensor):
        size = len(piece) // other * own
        yield base.data[start : start + size], piece
        start += size


def _floats(data: np.ndarray, format_: str) -> np.ndarray:
    size = FLOAT_DTYPES[format_.upper()][1]
    return Tensor("", format_, (len(data) // size,), data).to_f32()


def changeable_in(
    adapted: Sequence[Adapted], checkpoint: Checkpoint, *,
    element_bytes: int = 4, free_bytes: Callable[[], int] | None = None, head: Iterable[str] = (),
) -> Changeable:  # fmt: skip
    """Return what a plan lets adapters change, and the tensors of a `head`."""
    products = [*products_of(adapted)]
    embeddings = {each.name for each in adapted if isinstance(each, AdaptedEmbedding)}
    columns = [each for each in adapted if isinstance(each, AdaptedColumns)]
    of_head = frozenset(head)
    return Changeable(
        frozenset(name for product in products for name in product.layers) | of_head,
        checkpoint,
        frozenset(embeddings),
        frozenset({*embeddings, *(HEAD for _ in columns)}),
        frozenset(name for product in products if product.biases is not None for name in product.biases.names),
        of_head,
        next((each.name for each in columns if each.name in embeddings), ""),
        element_bytes,
        free_bytes,
    )


def unchangeable(what: str) -> ModelError:
    """Return the error for an adapter of which a part, such as a field of its config, changes something else."""
    return ModelError(
        f"{what}, which can't be changed for some requests alone; merge the adapter into its model with peft's "
        "merge_and_unload()"
    )
