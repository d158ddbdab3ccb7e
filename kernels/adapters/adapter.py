"""Adapters as plain values: what they change in a base model, tensor by tensor, whatever file they come from.

All arrays lie in memory, not in mapped files, so that nothing that happens to the files later changes a loaded adapter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from quire.kernels.weights.tensor import Tensor

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LowRank:
    """The change of one linear layer: W x + scale B (A x) + bias takes the place of W x.

    `stored_a` is A [rank, inputs] and `stored_b` is B [outputs, rank], in the dtypes of the file. `bias` [outputs] is
    already scaled. With `magnitude` m [outputs] (DoRA, arXiv 2402.09353) each row of W + scale B A is multiplied by its
    m / ||row||, before the base's own bias is added.
    """

    stored_a: Tensor
    stored_b: Tensor
    scale: float
    bias: Floats | None = None
    magnitude: Floats | None = None

    @property
    def rank(self) -> int:
        """Rows of A, and columns of B."""
        return self.stored_a.shape[0]

    @property
    def a(self) -> Floats:
        """A copy of A [rank, inputs]."""
        return self.stored_a.to_f32()

    @property
    def b(self) -> Floats:
        """A copy of B [outputs, rank]."""
        return self.stored_b.to_f32()


@dataclass(frozen=True)
class TokenRows:
    """Rows of an embedding that an adapter replaces: row i of `rows` [tokens, hidden size] is that of `tokens[i]`."""

    tokens: tuple[int, ...]
    rows: Tensor


@dataclass(frozen=True)
class Adapter:
    """Changes that an adapter makes to its base model, by the names of the base's tensors.

    `layers` are changes of linear layers. `embeddings` are changes of embeddings: a token t has scale B A[:, t] more,
    so A is [rank, vocabulary] and B [hidden size, rank]. `replaced` are whole tensors that take the place of the
    base's: weights of layers and embeddings that were trained, and biases, also those of norms. Changes of `layers` and
    `embeddings` are then added to these. PEFT also saves each embedding or head that it changes whole, mostly as the
    base has it. `tokens` are replaced rows of embeddings, or of the head.

    The head is always `lm_head.weight`. Where the base ties it to the embedding, `embeddings` and `replaced` leave it
    as it was in the base, but `tokens` of the embedding are replaced in the head too, unless it has some of its own.

    `task_name` and `prompt_prefix` are texts of GGUF files for users, which change nothing.
    """

    layers: Mapping[str, LowRank]
    embeddings: Mapping[str, LowRank] = field(default_factory=dict)
    replaced: Mapping[str, Tensor] = field(default_factory=dict)
    tokens: Mapping[str, TokenRows] = field(default_factory=dict)
    task_name: str = ""
    prompt_prefix: str = ""

    @property
    def max_rank(self) -> int:
        """Largest rank of all layers, 0 if there are none."""
        return max((layer.rank for layer in self.layers.values()), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(len(data) for _, data in self._contents())

    @cached_property
    def digest(self) -> str:
        """A hash of all that the adapter changes, and of nothing else: names of files and texts are not part of it."""
        found = hashlib.sha256()
        for description, data in self._contents():
            found.update(f"{len(description)}:{description}{len(data)}:".encode())
            found.update(data.data)
        return found.hexdigest()

    def _contents(self) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
        """Yield a description and the bytes of each array, in a fixed order."""
        for kind, group in (("layer", self.layers), ("embedding", self.embeddings)):
            for name, layer in sorted(group.items()):
                at = f"{kind} {name} {layer.scale.hex()}"
                yield _described(f"{at} A", layer.stored_a)
                yield _described(f"{at} B", layer.stored_b)
                for part, values in (("bias", layer.bias), ("magnitude", layer.magnitude)):
                    if values is not None:
                        yield f"{at} {part}", values.view(np.uint8)
        for name, tensor in sorted(self.replaced.items()):
            yield _described(f"replaced {name}", tensor)
        for name, tokens in sorted(self.tokens.items()):
            yield _described(f"tokens {name} {tokens.tokens}", tokens.rows)


def _described(at: str, tensor: Tensor) -> tuple[str, npt.NDArray[np.uint8]]:
    return f"{at} {tensor.format} {tensor.shape}", tensor.stored
