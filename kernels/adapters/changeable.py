"""Parts of a base model that adapters may change for the requests that ask for them, and for no others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.kernels.adapters.files import AdapterFile, StoredTensor
from quire.kernels.errors import ModelError
from quire.kernels.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class Changeable:
    """The linear layers that may have changes of low rank, by the names of their weights. All else must be as it is in
    the checkpoint: PEFT saves whole embeddings that it has not trained."""

    layers: frozenset[str]
    checkpoint: Checkpoint

    def is_same(self, file: AdapterFile, tensor: StoredTensor, name: str) -> bool:
        """Return whether a tensor of a file is that of the base. It is read piece by piece, and not kept."""
        if not self.checkpoint.has_floats(name):
            return False
        base = self.checkpoint.get(name, tensor.shape)
        if base.format != tensor.format:
            return False
        data, start = base.data, 0
        for piece in file.pieces(tensor):
            if not np.array_equal(data[start : start + len(piece)], piece):
                return False
            start += len(piece)
        return True


def unchangeable(what: str) -> ModelError:
    """Return the error for an adapter of which a part, such as a field of its config, changes something else."""
    return ModelError(
        f"{what}, and only layers of attention and dense feed-forward layers can be changed for some requests alone; "
        "merge the adapter into its model with peft's merge_and_unload()"
    )
