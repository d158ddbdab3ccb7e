"""Scores of pairs of texts by their embeddings."""

from __future__ import annotations

from operator import mul

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


def score(first: EmbeddingRequestOutput, second: EmbeddingRequestOutput) -> ScoringRequestOutput:
    """Return the cosine of two embeddings of length 1. Their dot product is summed in f64, in the order of values."""
    cosine = sum(map(mul, first.outputs.embedding, second.outputs.embedding))
    return ScoringRequestOutput(first.prompt_token_ids + second.prompt_token_ids, ScoringOutput(cosine))
