"""Outputs of requests; names and meanings are vLLM's."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from quire.protocol.messages import EngineCoreEvent


class RequestOutputKind(StrEnum):
    """Contents of an output: everything so far, the new part, or everything at the end, the only output."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """Log probability of one token at one position; `rank` 1 is the most likely token of the vocabulary."""

    logprob: float
    rank: int
    decoded_token: str | None = None


# Per position: the sampled (or, in a prompt, the given) token first, then the top N in descending order.
PositionLogprobs = dict[int, Logprob]


class RouteHop(msgspec.Struct):
    """An engine that a request was sent to, by its number.

    `reason`: why the router chose it: "turn", "load", "session" or "prefix". `left`: why the request did not stay there
    to its end: the engine was "lost", or the request was "moved" since the engine was to end; "" if it stayed.
    """

    engine: int
    reason: str
    left: Literal["", "lost", "moved"] = ""


class RequestMetrics(msgspec.Struct, gc=False):
    """Times of one request in seconds of the engine's monotonic clock; None before the event.

    `arrival_time` is measured by the frontend; on one machine the two clocks are the same. `route`: the engines that
    the request was sent to, the latest last.
    """

    arrival_time: float
    queued_time: float | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    events: list[EngineCoreEvent] = msgspec.field(default_factory=list)
    route: list[RouteHop] = msgspec.field(default_factory=list)

    @property
    def engine(self) -> int | None:
        """Number of the engine that the request was sent to last, None before that."""
        return self.route[-1].engine if self.route else None

    @property
    def routing(self) -> str:
        """Why the router chose this engine: "turn", "load", "session" or "prefix"."""
        return self.route[-1].reason if self.route else ""


class EmbeddingOutput(msgspec.Struct, gc=False):
    """The vector of one prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of values."""
        return len(self.embedding)


class EmbeddingRequestOutput(msgspec.Struct, gc=False):
    """A prompt and its embedding; `prompt` is None if the prompt was given as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0


class ClassificationOutput(msgspec.Struct, gc=False):
    """A score for each label of the model: probabilities, or with `use_activation=False` logits."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


class ClassificationRequestOutput(msgspec.Struct, gc=False):
    """A prompt and the scores of the model's labels."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ClassificationOutput
    metrics: RequestMetrics
    finished: bool = True


class PoolingOutput(msgspec.Struct, gc=False):
    """The vector of one prompt, whatever the task."""

    data: list[float]


class PoolingRequestOutput(msgspec.Struct, gc=False):
    """A prompt and its vector: an embedding, or the scores of labels."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    finished: bool = True


class ScoringOutput(msgspec.Struct, gc=False):
    """The score of two texts: the similarity of their embeddings, or what a model that reads both makes of them."""

    score: float


class ScoringRequestOutput(msgspec.Struct, gc=False):
    """A pair of texts and its score; `prompt_token_ids` are those of both texts, one after the other."""

    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True


class CompletionOutput(msgspec.Struct, gc=False):
    """One completion: all of it so far, or in a delta only the new part.

    `finish_reason` is None while it grows, then "stop", "length", "timeout" or "abort"; `stop_reason` is the stop
    string or stop token id that ended it. `cumulative_logprob` and `logprobs` are None unless requested; the former is
    also set if completions were ranked by it, with `best_of` or in a beam search. When it has ended,
    `num_accepted_drafts` of its tokens were drafted, and `num_rejected_drafts` others were computed in vain.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0

    def finished(self) -> bool:
        """Return True if the completion is complete."""
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct, gc=False):
    """A request and its output: one `CompletionOutput` for each of `n`.

    With `best_of` or a beam search the best come first, and there are none until all have ended. `prompt` is None if
    the prompt was given as token ids; `prompt_logprobs` has one entry for each prompt token, the first of them None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
