"""A request inside the engine, and the states it goes through."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from quire.protocol.messages import (
    EngineCoreEvent,
    EngineCoreRequest,
    EventType,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
)

NO_SLOT = -1


class RequestStatus(enum.IntEnum):
    """Where a request stands; anything past PREEMPTED is finished."""

    WAITING = 0
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_IGNORED = 7
    FINISHED_ERROR = 8

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason:
        """What users are told; KeyError for a request that has not ended."""
        return _FINISH_REASONS[self]


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.ERROR,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


@dataclass(slots=True, eq=False)
class Request:
    """A sequence whose `num_computed_tokens` is behind its `num_tokens`; the scheduler lets it catch up.

    The sampled tokens themselves live in the executor's slot; here they are only counted. Compared by identity:
    two clients may use the same `request_id`.
    """

    client_id: bytes
    request_id: str
    prompt_token_ids: list[int] = field(repr=False)
    sampling: SamplingParams = field(repr=False)
    seed: int
    eos_token_ids: frozenset[int] = field(repr=False)
    stop_token_ids: frozenset[int] = field(repr=False)  # eos_token_ids included, unless they are ignored
    max_total_tokens: int  # LENGTH at this many tokens
    token_limit: int  # max_total_tokens, or less when the KV pages of the whole engine hold less
    num_tokens: int  # prompt + sampled
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_reserved_tokens: int = 0  # positions that its KV pages cover
    slot: int = NO_SLOT  # its handle in the executor, from when it first runs
    events: list[EngineCoreEvent] = field(default_factory=list, repr=False)  # not yet told to the client
    prompt_logprobs: list[TokenLogprobs | None] | None = field(default=None, repr=False)  # not yet told to the client

    @classmethod
    def from_message(
        cls, client_id: bytes, message: EngineCoreRequest, *, seed: int, max_model_len: int, pool_tokens: int
    ) -> Request:
        """The request of a message that `check_request` has accepted; `seed` is used if it names none."""
        sampling = message.sampling_params
        prompt = message.prompt_token_ids
        room = max_model_len - len(prompt) if sampling.max_tokens is None else sampling.max_tokens
        eos = frozenset(() if sampling.ignore_eos else message.eos_token_ids)
        return cls(
            client_id=client_id,
            request_id=message.request_id,
            prompt_token_ids=prompt,
            sampling=sampling,
            seed=seed if sampling.seed is None else sampling.seed,
            eos_token_ids=eos,
            stop_token_ids=eos.union(sampling.stop_token_ids or ()),
            max_total_tokens=len(prompt) + room,
            # A last token is sampled at the pool's last position; it could not be computed in its turn.
            token_limit=min(len(prompt) + room, pool_tokens + 1),
            num_tokens=len(prompt),
            prompt_logprobs=None if sampling.prompt_logprobs is None else [None],
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the client gave."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return self.num_tokens - len(self.prompt_token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Tokens it has but has not computed yet: at least 1 while it is not finished."""
        return self.num_tokens - self.num_computed_tokens

    def record(self, event: EventType, timestamp: float) -> None:
        """Notes an event; it goes out with the request's next output."""
        self.events.append(EngineCoreEvent(event, timestamp))

    def forget_computed(self) -> None:
        """Its KV pages are gone: everything has to be computed again.

        Prompt logprobs stay: the executor gives each of them once, whatever is computed again.
        """
        self.num_computed_tokens = 0
        self.num_reserved_tokens = 0
