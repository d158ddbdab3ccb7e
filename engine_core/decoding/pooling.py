"""Pooling: the prompt's hidden states become an embedding, and no token follows."""

from __future__ import annotations

from quire.engine_core.decoding.single import open_sequence
from quire.engine_core.request import Decoding, Request, StepOutcome
from quire.engine_core.validation import RejectedError, check_is_new, check_prompt, check_service
from quire.kernels.runner import PoolingConfig, Sequences
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, PoolingParams, SamplingParams


class Pooling(Decoding):
    """The sequence of a prompt, which ends with its vector when it is computed."""

    __slots__ = ("needs_every_token", "params")

    def __init__(self, message: EngineCoreRequest, limits: EngineShape) -> None:
        super().__init__(message, limits)
        self.params = message.pooling or PoolingParams()
        self.needs_every_token = self.params.pooling_type == "mean"

    @staticmethod
    def check(message: EngineCoreRequest, limits: EngineShape) -> None:
        """Check the prompt and the vector that it is to become."""
        check_service(message, limits)
        check_prompt(message, limits, room=0)
        check_is_new(message, "an embedding")
        dimensions = message.pooling.dimensions if message.pooling is not None else None
        if dimensions is not None and not 1 <= dimensions <= limits.hidden_size:
            raise RejectedError(
                f"dimensions={dimensions} is out of range; the model's embeddings have {limits.hidden_size} values, so "
                f"it must be from 1 to {limits.hidden_size}, or None for all"
            )
        if message.sampling_params != SamplingParams():
            raise RejectedError("an embedding generates no tokens; leave sampling_params at their defaults")
        if message.shares_prompt_with is not None:
            raise RejectedError(
                "an embedding has no samples that could share its prompt, which is all it computes; leave out "
                "shares_prompt_with"
            )

    def max_total_tokens(self, message: EngineCoreRequest) -> int:
        """Return the length of the prompt."""
        return len(message.prompt_token_ids)

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
