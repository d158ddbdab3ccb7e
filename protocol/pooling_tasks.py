"""Checks of pooling parameters against what a model can do; the frontend and the engine make them alike."""

from __future__ import annotations

from quire.protocol.messages import PoolingParams
from quire.protocol.pooling_info import PoolingInfo


def check_pooling(params: PoolingParams, model: PoolingInfo, embedding_size: int) -> None:
    """Raise `ValueError` for a task that the model can't do, or a parameter that does not belong to the task."""
    if params.task == "classify":
        if not model.labels:
            raise ValueError(f"this model has no labels to classify by; it {model.tasks}")
        for name in ("pooling_type", "dimensions", "normalize"):
            if (value := getattr(params, name)) is not None:
                raise ValueError(f"{name}={value!r} has no meaning in a classification; leave it out")
        if params.num_skipped:
            raise ValueError(f"num_skipped={params.num_skipped} has no meaning in a classification; leave it out")
        return
    if not model.embeds:
        raise ValueError(f"this model gives no embeddings; it {model.tasks}")
    if params.use_activation is not None:
        raise ValueError(f"use_activation={params.use_activation} belongs to a classification; leave it out")
    if params.dimensions is not None and not 1 <= params.dimensions <= embedding_size:
        raise ValueError(
            f"dimensions={params.dimensions} is out of range; the model's embeddings have {embedding_size} values, so "
            f"it must be from 1 to {embedding_size}, or None for all"
        )
    if params.num_skipped and (params.pooling_type or model.pooling_type) not in ("mean", "max"):
        raise ValueError(f"num_skipped={params.num_skipped} belongs to a mean or a maximum; leave it out")
