"""Heads of classifications, which a request's adapter may change: they are computed apart from the kernels' plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.kernels._native import PoolingHead
from quire.kernels.adapted import HEAD
from quire.kernels.adapters.adapter import Adapter, LowRank, TokenRows
from quire.kernels.errors import ModelError
from quire.kernels.operands import FloatTensors
from quire.kernels.pooling.heads import HeadPart, HeadTokens, native_head, read_head, shapes_of_head
from quire.kernels.weights.tensor import Tensor


@dataclass(frozen=True)
class ClassifierHead:
    """The head of a classification of hidden states of `hidden_size`: none if there are no parts."""

    parts: tuple[HeadPart, ...] = ()
    hidden_size: int = 0

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors that are of the head alone."""
        return shapes_of_head(self.parts, self.hidden_size)

    def changed(self, adapter: Adapter, base: FloatTensors) -> PoolingHead | None:
        """Return the head as an adapter changes it, None if it does not. Raises ModelError."""
        own = {name: name for name in self.shapes}
        own |= {part.weight: HEAD for part in self.parts if isinstance(part, HeadTokens)}
        tensors = _ChangedTensors(adapter, base, own)
        if not any(map(tensors.has_own, own)):
            return None
        return native_head(read_head(self.parts, tensors, self.hidden_size))


NO_HEAD = ClassifierHead()


class _ChangedTensors:
    """The tensors of a head, with what an adapter changes of them. `names`: those that the adapter has for them."""

    def __init__(self, adapter: Adapter, base: FloatTensors, names: Mapping[str, str]) -> None:
        self._adapter, self._base, self._names = adapter, base, names

    def has_own(self, name: str) -> bool:
        """Return whether the adapter changes a tensor."""
        adapter, own = self._adapter, self._names[name]
        return own in adapter.layers or own in adapter.replaced or self._trained(name) is not None

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See FloatTensors."""
        own = self._names[name]
        change, whole = self._adapter.layers.get(own), self._adapter.replaced.get(own)
        if change is not None and change.bias is not None:
            raise ModelError(
                f"lora_bias changes {own}, and the layers of a classifier can't have it; train the adapter without it"
            )
        whole = self._base.get(name, shape) if whole is None else whole
        trained = self._trained(name)
        if change is None and trained is None:
            return whole
        return _ChangedRows(name, "f32", shape, whole.stored, whole, change, trained)

    def _trained(self, name: str) -> TokenRows | None:
        """Return the rows of tokens that the head has of its own, or of the embedding that it is tied to."""
        tokens = self._adapter.tokens
        return tokens.get(self._names[name], tokens.get(name))


@dataclass(frozen=True)
class _ChangedRows(Tensor):
    """The f32 rows of `whole` or of tokens, with a change of low rank; `data` is a copy."""

    whole: Tensor
    change: LowRank | None
    trained: TokenRows | None

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The bytes of all rows."""
        return self.rows(0, self.shape[0]).data

    def rows(self, first: int, count: int) -> Tensor:
        """See Tensor: only these rows are computed."""
        values = self.whole.rows(first, count).to_f32().astype(np.float64)
        if self.trained is not None:
            for number, token in enumerate(self.trained.tokens):
                if first <= token < first + count:
                    values[token - first] = self.trained.rows.row(number)
        if self.change is not None:
            b, a = (half.astype(np.float64) for half in (self.change.b[first : first + count], self.change.a))
            values += self.change.scale * np.einsum("or,ri->oi", b, a, optimize=False)  # BLAS has an order of its own
            if self.change.magnitude is not None:
                values *= (self.change.magnitude[first : first + count] / np.sqrt(np.square(values).sum(1)))[:, None]
        return Tensor(self.name, self.format, values.shape, values.astype(np.float32).reshape(-1).view(np.uint8))
