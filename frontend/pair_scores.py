"""Scores of pairs of texts: by a model that reads both, or by the similarity of their embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.frontend.outputs import EmbeddingRequestOutput, ScoringOutput, ScoringRequestOutput
from quire.protocol.messages import PoolingParams
from quire.protocol.pooling_info import PoolingInfo


def reads_pairs(model: PoolingInfo) -> bool:
    """Return True if the model reads both texts of a pair, False if their embeddings are compared.

    Raises ValueError for a model that can do neither.
    """
    if len(model.labels) == 1:
        return True
    if model.embeds:
        return False
    raise ValueError(f"this model can't score pairs of texts; it {model.tasks}")


def pair_of(first: Sequence[Any], second: Sequence[Any], index: int) -> tuple[str, str]:
    """Return the texts of a pair: the only first one, or that of the index. Raises ValueError for token ids."""
    pair = first[index if len(first) > 1 else 0], second[index]
    texts = [each["prompt"] if isinstance(each, dict) and set(each) == {"prompt"} else each for each in pair]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("this model reads pairs of texts, which it joins itself; give texts, not token ids")
    return texts[0], texts[1]


def pair_params(params: PoolingParams | None) -> PoolingParams:
    """Return the parameters with which a pair is scored."""
    return msgspec.structs.replace(params or PoolingParams(), task="classify")


def pair_score(output: EmbeddingRequestOutput) -> ScoringRequestOutput:
    """Return the score of a pair that the model has read: that of its only label."""
    return ScoringRequestOutput(output.prompt_token_ids, ScoringOutput(output.outputs.embedding[0]))


def similarity_params(model: PoolingInfo, params: PoolingParams | None, instruction: str | None) -> PoolingParams:
    """Return the parameters of embeddings that are compared: cosines need vectors of length 1. Raises ValueError."""
    if instruction is not None:
        raise ValueError("instruction is not possible: this model embeds each text on its own; leave it out")
    params = params or PoolingParams()
    if model.similarity != "cosine":
        return params
    if params.normalize is False:
        raise ValueError("normalize=False is not allowed in a score, which is a cosine; leave it out")
    return msgspec.structs.replace(params, normalize=True)
