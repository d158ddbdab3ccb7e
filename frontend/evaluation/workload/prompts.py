"""Makes the prompts of a workload."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from quire.frontend.evaluation.workload.blocks import mix
from quire.frontend.evaluation.workload.request import WorkloadRequest

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Prompts:
    """Token ids, pseudo-random ones that a block's name and the place in it decide, and `seed`.

    So the same block has the same tokens in each prompt, and others have others. `avoid` are ids that are never given:
    those with a meaning, such as the end token. Raises ValueError if they leave none.
    """

    def __init__(self, vocab_size: int, seed: int = 0, *, avoid: Iterable[int] = ()) -> None:
        avoided = set(avoid)
        allowed = [token for token in range(vocab_size) if token not in avoided]
        if not allowed:
            raise ValueError(
                f"vocab_size={vocab_size} without the {len(avoided)} ids to avoid leaves no token; avoid fewer"
            )
        # Prompts share the int objects, so that a token that waits takes 8 bytes and not 40.
        self._ints = np.array(allowed, dtype=object)
        self._seed = np.uint64(mix(seed))

    def tokens(self, request: WorkloadRequest) -> list[int]:
        """The prompt: `prompt_tokens` ids."""
        blocks = np.array(request.blocks, dtype=np.int64).view(np.uint64)
        places = np.arange(request.block_tokens, dtype=np.uint64) * _GOLDEN
        starts = _mixed(blocks ^ self._seed)
        bits = _mixed((starts[:, np.newaxis] + places).ravel()[: request.prompt_tokens])
        # The high half of a product is a fair choice, and needs no division.
        chosen = (bits >> np.uint64(32)) * np.uint64(len(self._ints)) >> np.uint64(32)
        prompt: list[int] = self._ints[chosen.astype(np.int64)].tolist()
        return prompt


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix` of each."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
