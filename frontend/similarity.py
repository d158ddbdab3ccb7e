"""Scores of pairs of texts by their embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import mul, sub

from quire.frontend.outputs import EmbeddingRequestOutput, ScoringOutput, ScoringRequestOutput


def num_pairs(num_first: int, num_second: int) -> int:
    """Return the number of pairs of the texts of two lists: one with all, or each with the other of its index.

    Raises ValueError for empty lists and lists that do not match.
    """
    if not num_first or not num_second:
        raise ValueError("there is no text to score; give at least one on each side")
    if num_first not in (1, num_second):
        raise ValueError(
            f"{num_first} texts can't be paired with {num_second}; give one and many, or as many on each side"
        )
    return num_second


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return float(sum(map(mul, left, right)))


def _cosine(left: Sequence[float], right: Sequence[float]) -> float:
    return max(-1.0, min(_dot(left, right), 1.0))  # vectors are of length 1 only to the precision of f32


def _negative_distance(left: Sequence[float], right: Sequence[float]) -> float:
    return -math.sqrt(sum(value * value for value in map(sub, left, right)))


def _negative_manhattan(left: Sequence[float], right: Sequence[float]) -> float:
    return -float(sum(map(abs, map(sub, left, right))))


SIMILARITIES: dict[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "cosine": _cosine,
    "dot": _dot,
    "euclidean": _negative_distance,
    "manhattan": _negative_manhattan,
}
"""Similarities by the names of sentence-transformers; that of a cosine needs vectors of length 1."""


def score(
    first: EmbeddingRequestOutput, second: EmbeddingRequestOutput, similarity: str = "cosine"
) -> ScoringRequestOutput:
    """Return the similarity of two embeddings. Sums are in f64, in the order of values."""
    value = SIMILARITIES[similarity](first.outputs.embedding, second.outputs.embedding)
    return ScoringRequestOutput(first.prompt_token_ids + second.prompt_token_ids, ScoringOutput(value))
