"""Pooling: the prompt's hidden states become an embedding, and no token follows."""

from __future__ import annotations

from quire.engine_core.decoding.single import open_sequence
from quire.engine_core.request import Decoding, Request, StepOutcome
from quire.kernels.runner import PoolingConfig, Sequences
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import EngineCoreOutput, FinishReason, PoolingParams


class Pooling(Decoding):
    """The sequence of a prompt, which ends with its vector when it is computed."""

    __slots__ = ("needs_every_token", "params")

    def __init__(self, params: PoolingParams, limits: EngineShape) -> None:
        super().__init__(limits)
        self.params = params
        self.needs_every_token = params.pooling_type == "mean"

    def open(self, request: Request, sequences: Sequences) -> int:
        """Open the sequence with its kind of pooling."""
        params = self.params
        pooling = PoolingConfig(type=params.pooling_type, normalize=params.normalize, dimensions=params.dimensions or 0)
        return open_sequence(sequences, request, pooling=pooling)

    def take(self, request: Request, row: int, outcome: StepOutcome) -> EngineCoreOutput | None:
        """End with the vector, once the prompt is computed."""
        vector = outcome.pooled.get(row)
        if vector is None:
            return None
        output = EngineCoreOutput(request.request_id, pooled=vector)
        outcome.ended.append((request, output))
        return request.conclude(output, FinishReason.STOP, outcome.now)
