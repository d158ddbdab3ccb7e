"""A request inside the engine, and the states it goes through."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.engine_core.decoding.beam_search import BeamSearch
from quire.engine_core.limits import EngineLimits
from quire.protocol.messages import (
    EngineCoreEvent,
    EngineCoreRequest,
    EventType,
    FinishReason,
    PoolingParams,
    SamplingParams,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from quire.engine_core.grammar.grammars import Grammar
    from quire.engine_core.scheduling.siblings import Siblings
    from quire.kernels.runner import Constraint


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
    FINISHED_TIMEOUT = 9

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
    RequestStatus.FINISHED_TIMEOUT: FinishReason.TIMEOUT,
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
    number: int = 0  # in order of arrival
    priority: int = 0  # the lower, the sooner
    cache_salt: str | None = None  # shares KV pages with requests of the same salt; None: with none
    arrival: float = 0.0  # when the engine received it
    deadline: float = math.inf  # when it ends, wherever it stands
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of these, those that were found computed when it first started
    num_reserved_tokens: int = 0  # positions that its KV pages cover
    num_preemptions: int = 0
    num_lost_tokens: int = 0  # computed before it was preempted, and perhaps to be computed again
    num_passed_over: int = 0  # steps in which the policy started one that had come later
    queue_key: float = 0.0  # its place among those that wait
    siblings: Siblings | None = field(default=None, repr=False)  # those of the same prompt
    search: BeamSearch | None = field(default=None, repr=False)
    pooling: PoolingParams | None = None  # of its prompt, which nothing follows
    grammar: Grammar | None = field(default=None, repr=False)
    constraint: Constraint | None = field(default=None, repr=False)
    slot: int = NO_SLOT  # its handle in the executor, from when it first waits at the front
    events: list[EngineCoreEvent] = field(default_factory=list, repr=False)  # not yet told to the client
    prompt_logprobs: list[TokenLogprobs | None] | None = field(default=None, repr=False)  # not yet told to the client

    @classmethod
    def from_message(
        cls, client_id: bytes, message: EngineCoreRequest, *, seed: int, now: float, limits: EngineLimits
    ) -> Request:
        """The request of a message that `check_request` has accepted; `seed` is used if it names none."""
        sampling = message.sampling_params
        prompt = message.prompt_token_ids
        room = limits.max_model_len - len(prompt) if sampling.max_tokens is None else sampling.max_tokens
        if message.pooling is not None:
            room = 0
        eos = frozenset(() if sampling.ignore_eos else message.eos_token_ids)
        stop = eos.union(sampling.stop_token_ids or ())
        return cls(
            client_id=client_id,
            request_id=message.request_id,
            prompt_token_ids=prompt,
            sampling=sampling,
            seed=seed if sampling.seed is None else sampling.seed,
            eos_token_ids=eos,
            stop_token_ids=stop,
            max_total_tokens=len(prompt) + room,
            # A last token is sampled at the pool's last position; it could not be computed in its turn.
            token_limit=min(len(prompt) + room, limits.pool_tokens + 1),
            num_tokens=len(prompt),
            priority=message.priority,
            cache_salt=message.cache_salt if limits.enable_prefix_caching else None,
            arrival=now,
            deadline=now + message.timeout if message.timeout is not None else math.inf,
            prompt_logprobs=None if sampling.prompt_logprobs is None else [None],
            search=BeamSearch(sampling, stop, eos, room) if sampling.beam_width else None,
            pooling=message.pooling,
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

    @property
    def in_prefill(self) -> bool:
        """Whether it has more than its last token to compute, or has sampled none yet. Asked of all in each step."""
        computed = self.num_computed_tokens
        return self.num_tokens - computed > 1 or computed < len(self.prompt_token_ids)

    @property
    def width(self) -> int:
        """How many sequences it may have at a time."""
        return 1 if self.search is None else self.search.width

    @property
    def slots(self) -> list[int]:
        """Of all its sequences."""
        if self.search is not None and self.search.live:
            return self.search.slots
        return [] if self.slot == NO_SLOT else [self.slot]

    @property
    def needs_every_token(self) -> bool:
        """Whether each token of its prompt gives something that must be computed, and that pages don't hold."""
        is_mean = self.pooling is not None and self.pooling.pooling_type == "mean"
        return is_mean or self.sampling.prompt_logprobs is not None

    @property
    def num_shared_tokens(self) -> int:
        """Positions of its prompt that it can take over from a sibling: at least one token is left to compute."""
        return min(self.num_prompt_tokens, self.num_tokens - 1)

    def has_computed_for(self, other: Request) -> bool:
        """Whether `other`, one of its siblings, can fork from it now."""
        return 0 < other.num_shared_tokens <= self.num_computed_tokens and not other.needs_every_token

    def keep_a_token_to_compute(self) -> None:
        """If all its tokens are computed, and none was drawn, as its mask was late, the last is computed again."""
        self.num_computed_tokens -= self.num_computed_tokens == self.num_tokens

    def forget_computed(self) -> None:
        """Its KV pages are gone: what the prefix cache does not keep has to be computed again.

        Prompt logprobs stay: the executor gives each of them once, whatever is computed again. A beam search begins
        again with its prompt.
        """
        self.num_lost_tokens = self.num_computed_tokens
        self.num_computed_tokens = 0
        self.num_reserved_tokens = 0
        if self.search is not None:
            self.num_lost_tokens += (len(self.search.live) - 1) * self.num_output_tokens
            self.num_tokens = self.num_prompt_tokens
            self.search.restart()
