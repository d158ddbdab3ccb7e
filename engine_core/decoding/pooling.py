"""Pooling: the prompt's hidden states become an embedding or scores of labels, and no token follows."""

from __future__ import annotations

from quire.engine_core.decoding.single import open_sequence
from quire.engine_core.request import Decoding, Request, StepOutcome
from quire.engine_core.validation import RejectedError, check_prompt, check_prompt_only, check_service
from quire.kernels.runner import PoolingConfig
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, PoolingParams, SamplingParams
from quire.protocol.pooling_tasks import check_pooling


class Pooling(Decoding):
    """The sequence of a prompt, which ends with its vector when it is computed."""

    __slots__ = ("needs_every_token", "params", "pooling_type", "segment")

    def __init__(self, message: EngineCoreRequest, limits: EngineShape) -> None:
        super().__init__(message, limits)
        self.params = message.pooling or PoolingParams()
        self.pooling_type = _type_of(self.params, limits)
        self.needs_every_token = self.pooling_type != "last"
        self.segment = message.segment

    @staticmethod
    def check(message: EngineCoreRequest, limits: EngineShape) -> None:
        """Check the prompt and the vector that it is to become."""
        check_service(message, limits)
        check_prompt(message, limits, room=0)
        kind = (
            "a classification" if message.pooling is not None and message.pooling.task == "classify" else "an embedding"
        )
        check_prompt_only(message, kind)
        _check_task(message.pooling or PoolingParams(), message, limits)
        if message.sampling_params != SamplingParams():
            raise RejectedError(f"{kind} generates no tokens; leave sampling_params at their defaults")
        if message.shares_prompt_with is not None:
            raise RejectedError(
                f"{kind} has no samples that could share its prompt, which is all it computes; leave out "
                "shares_prompt_with"
            )

    def max_total_tokens(self, message: EngineCoreRequest) -> int:
        """Return the length of the prompt."""
        return len(message.prompt_token_ids)

    def open(self, request: Request) -> int:
        """Open the sequence with its kind of pooling."""
        return open_sequence(request, pooling=self._config(), segment=self.segment)

    def _config(self) -> PoolingConfig:
        params, model = self.params, self._limits.pooling
        if params.task == "classify":
            activation = "" if params.use_activation is False else model.activation
            return PoolingConfig(type=self.pooling_type, normalize=False, head=True, activation=activation)
        return PoolingConfig(
            type=self.pooling_type,
            normalize=model.normalize if params.normalize is None else params.normalize,
            dimensions=params.dimensions or 0,
            skipped=params.num_skipped,
            head=not model.labels,
        )

    def take(self, request: Request, row: int, outcome: StepOutcome) -> EngineCoreOutput | None:
        """End with the vector, once all is computed that it needs."""
        vector = outcome.pooled.get(row)
        if vector is None:
            return None
        output = EngineCoreOutput(request.request_id, pooled=vector)
        outcome.ended.append((request, output))
        return request.conclude(output, FinishReason.STOP, outcome.now)


def _type_of(params: PoolingParams, limits: EngineShape) -> str:
    model = limits.pooling
    return model.classifier_pooling if params.task == "classify" else params.pooling_type or model.pooling_type


def _check_task(params: PoolingParams, message: EngineCoreRequest, limits: EngineShape) -> None:
    """Raise RejectedError unless the model can do what the parameters ask for."""
    model, num_prompt = limits.pooling, len(message.prompt_token_ids)
    try:
        check_pooling(params, model, limits.hidden_size)
    except ValueError as error:
        raise RejectedError(str(error)) from None
    if params.num_skipped >= num_prompt:
        raise RejectedError(f"num_skipped={params.num_skipped} leaves none of {num_prompt} tokens; lower it")
    if message.segment and (model.num_token_types < 2 or message.segment > num_prompt):
        raise RejectedError(
            f"segment={message.segment} is not possible; it may be up to the prompt's {num_prompt} tokens, and only "
            "for a model with two token types; leave it out"
        )
