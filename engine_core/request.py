"""A request inside the engine, the states it goes through, and the interface of its decoding."""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from quire.engine_core.executor import Executor, LogprobsEntry, StepResult
from quire.kernels.runner import Constraint, Sequences
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreRequest,
    EventType,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
)

NO_SLOT = -1

TenantName = str | bytes
"""The tenant of a request: the name that an administrator gave, else the id of the client."""


def tenant_of(client_id: bytes, message: EngineCoreRequest) -> TenantName:
    """Return the tenant of a client's request."""
    return message.tenant or client_id


def group_of(tenant: TenantName) -> TenantName:
    """Return the group of a tenant, which its name begins with before a "/"; else the tenant is a group of its own."""
    return tenant.partition("/")[0] if isinstance(tenant, str) else tenant


class RequestStatus(enum.Enum):
    """The state of a request in the engine."""

    WAITING = enum.auto()
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    WAITING_FOR_ADAPTER = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


class StepOutcome:
    """A `StepResult`, read out once: properties of the native one copy their contents at each access.

    With `spans`, it is about the rows whose samples have been collected, and no others. `num_drafts` of each row were
    computed; empty for none.
    Decodings add the requests that end with the step to `ended`, with their terminal outputs, and note in `accepted`
    how many drafts of a row have held.
    """

    __slots__ = ("accepted", "ended", "errors", "logprobs", "now", "num_drafts", "pooled", "token_ids")

    def __init__(
        self,
        result: StepResult,
        now: float,
        num_drafts: list[int],
        accepted: list[int],
        spans: Mapping[int, list[int]] | None = None,
    ) -> None:
        self.now = now
        self.num_drafts, self.accepted = num_drafts, accepted
        self.ended: list[tuple[Request, EngineCoreOutput]] = []
        self.token_ids: Sequence[list[int]] | Mapping[int, list[int]] = result.token_ids if spans is None else spans
        self.errors = result.errors
        self.pooled: Mapping[int, bytes] = result.pooled if spans is None else {}
        self.logprobs = result.logprobs


class Decoding(ABC):
    """The decoding of one request: its sequences, the pages that these need, and what a step's result means to it.

    One object a request. Its methods are given the request instead of keeping it, since the engine makes no reference
    cycles (its garbage collector is off). To the scheduler a request is `width` sequences at most, each of which puts
    one row into a step once the prompt is computed. Unless overridden, it is one sequence, in `request.slot`.
    """

    __slots__ = ("_limits",)

    width = 1  # most sequences that the request may have at a time
    needs_every_token = False  # each prompt token yields a result of its own, which KV pages do not hold
    takes_spans = False  # a step may give several tokens, so that some may be drafted

    def __init__(self, message: EngineCoreRequest, limits: EngineShape) -> None:
        """Decode the request of a message that `check` has accepted."""
        self._limits = limits

    @staticmethod
    @abstractmethod
    def check(message: EngineCoreRequest, limits: EngineShape) -> None:
        """Raise RejectedError for the first thing in a message that this engine cannot serve."""

    @abstractmethod
    def open(self, request: Request) -> int:
        """Open a sequence with the prompt, without pages; return its slot. ValueError if the executor rejects it."""

    @abstractmethod
    def take(self, request: Request, row: int, outcome: StepOutcome) -> EngineCoreOutput | None:
        """Take the result of a step, from `row` on; return the output for the client, if there is one.

        A request that ends is added to `outcome.ended` with its output.
        """

    def max_total_tokens(self, message: EngineCoreRequest) -> int:
        """Return the tokens, with the prompt's, at which the request ends."""
        max_tokens = message.sampling_params.max_tokens
        return self._limits.max_model_len if max_tokens is None else len(message.prompt_token_ids) + max_tokens

    def queue(self, request: Request) -> None:  # noqa: B027 - most requests wait for nobody
        """Wait, maybe again after a preemption, for a start that is possible from now on."""

    def source(self, request: Request) -> Request | None:
        """Return the running request to fork from; None if only the prefix cache may hold some of the prompt."""
        return None

    def begin(self, request: Request) -> None:  # noqa: B027 - one sequence has nothing to prepare
        """Start, maybe again after a preemption, with the prompt's sequence in `request.slot`."""

    def leave(self, request: Request) -> Request | None:
        """End, before the pages go; return the waiting request that is to fork from them first, if there is one."""
        return None

    def slots(self, request: Request) -> list[int]:
        """Return the slots of all its open sequences: the rows that it puts into the next step."""
        return [] if request.slot == NO_SLOT else [request.slot]

    def pages_lacked(self, request: Request, steps: int) -> int:
        """Return the KV pages that it lacks for the next `steps` steps, which add a token to each sequence."""
        return request.sequences.pages_lacked([request.slot], [request.num_tokens + steps - 1])

    def states_lacked(self, request: Request) -> int:
        """Return the records of state that it lacks for the next step: a sequence that has started has its own."""
        return 0

    def reserve(self, request: Request, executor: Executor) -> bool:
        """Get the pages for the next step, and fork the sequences that need it; return False if pages are short."""
        return request.sequences.reserve(request.slot, request.num_tokens)

    def preempt(self, request: Request) -> int:
        """Give back all pages; the slot keeps the tokens and the sampling state. Return how many tokens were computed.

        Prompt logprobs stay: the executor gives each of them once, whatever is computed again.
        """
        num_lost = request.num_computed_tokens
        request.sequences.release_pages(request.slot)
        return num_lost

    def close(self, request: Request) -> None:
        """Close all sequences."""
        for slot in self.slots(request):
            request.sequences.close(slot)
        request.slot = NO_SLOT


@dataclass(frozen=True, slots=True)
class StopConditions:
    """The tokens and lengths at which a request ends."""

    eos_token_ids: frozenset[int]
    token_ids: frozenset[int]  # stop tokens of the request, and eos_token_ids
    max_total_tokens: int  # length at which it ends with LENGTH, prompt included
    token_limit: int  # max_total_tokens, or less when the KV pages of the whole engine hold less

    @classmethod
    def of(cls, message: EngineCoreRequest, decoding: Decoding, limits: EngineShape) -> StopConditions:
        """Return those of a message."""
        sampling, max_total_tokens = message.sampling_params, decoding.max_total_tokens(message)
        eos = frozenset(() if sampling.ignore_eos else message.eos_token_ids)
        # A last token is sampled at the pool's last position; it could not be computed in its turn.
        token_limit = min(max_total_tokens, limits.pool_tokens + 1)
        return cls(eos, eos.union(sampling.stop_token_ids or ()), max_total_tokens, token_limit)


@dataclass(slots=True, eq=False)
class Request:
    """A sequence whose `num_computed_tokens` is behind its `num_tokens`; the scheduler lets it catch up.

    The tokens themselves, how many are computed and the KV pages lie in the executor's `sequences`, in the slots that
    `decoding` opens. Compared by identity: two clients may use the same `request_id`.
    """

    client_id: bytes
    request_id: str
    message: EngineCoreRequest = field(repr=False)
    sequences: Sequences = field(repr=False)  # sequences of the whole engine
    decoding: Decoding = field(repr=False)
    stop: StopConditions = field(repr=False)
    seed: int
    tenant: TenantName
    cache_salt: str | None  # requests of the same salt share KV pages; None: it shares none
    arrival: float  # time at which the engine received it
    num_prompt_tokens: int
    num_tokens: int  # prompt + sampled
    number: int = 0  # rank in the order of arrival
    status: RequestStatus = RequestStatus.WAITING
    num_cached_tokens: int = 0  # tokens that need not be computed when it first starts
    num_preemptions: int = 0
    constraint: Constraint | None = field(default=None, repr=False)
    adapter: int = 0  # number of its adapter in the kernels; 0: none, or none yet
    slot: int = NO_SLOT  # its sequence in the executor, opened when it first comes to the front of the queue
    events: list[EngineCoreEvent] = field(default_factory=list, repr=False)  # events that are not sent yet
    prompt_logprobs: list[TokenLogprobs | None] | None = field(default=None, repr=False)  # entries not sent yet

    @classmethod
    def from_message(
        cls, client_id: bytes, message: EngineCoreRequest, decoding: Decoding, *, seed: int, now: float,
        limits: EngineShape, sequences: Sequences,
    ) -> Request:  # fmt: skip
        """Make the request of a message that its decoding has accepted; `seed` is used if it names none."""
        sampling, num_prompt_tokens = message.sampling_params, len(message.prompt_token_ids)
        return cls(
            client_id=client_id,
            request_id=message.request_id,
            message=message,
            sequences=sequences,
            decoding=decoding,
            stop=StopConditions.of(message, decoding, limits),
            seed=seed if sampling.seed is None else sampling.seed,
            tenant=tenant_of(client_id, message),
            cache_salt=message.cache_salt if limits.enable_prefix_caching else None,
            arrival=now,
            num_prompt_tokens=num_prompt_tokens,
            num_tokens=num_prompt_tokens + len(message.generated_token_ids),
            prompt_logprobs=None if sampling.prompt_logprobs is None else [None],
        )

    @property
    def prompt_token_ids(self) -> list[int]:
        """The tokens of its prompt."""
        return self.message.prompt_token_ids

    @property
    def sampling(self) -> SamplingParams:
        """The parameters by which its tokens are sampled."""
        return self.message.sampling_params

    @property
    def deadline(self) -> float:
        """When it ends, whatever its state."""
        timeout = self.message.timeout
        return math.inf if timeout is None else self.arrival + timeout

    @property
    def width(self) -> int:
        """Most sequences that it may have at a time."""
        return self.decoding.width

    @property
    def needs_every_token(self) -> bool:
        """True if each token of the prompt gives a result that KV pages do not hold."""
        return self.decoding.needs_every_token or self.sampling.prompt_logprobs is not None

    @property
    def is_finished(self) -> bool:
        """True once the request has ended."""
        return self.status is RequestStatus.FINISHED

    @property
    def can_start(self) -> bool:
        """True if it waits for nothing but its turn, slots and pages."""
        return self.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)

    @property
    def has_begun(self) -> bool:
        """True if it runs, or has run here or in an earlier engine."""
        return self.num_tokens > self.num_prompt_tokens or self.num_preemptions > 0 or self.num_computed_tokens > 0

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that its KV pages hold: as many of each of its sequences."""
        return 0 if self.slot == NO_SLOT else self.sequences.num_computed_tokens(self.slot)

    @property
    def num_reserved_tokens(self) -> int:
        """Positions that the KV pages of each of its sequences cover."""
        return min(map(self.sequences.num_reserved_tokens, self.slots), default=0)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_new_tokens(self) -> int:
        """Tokens that are not computed yet: at least 1 while the request is not finished."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_forked_tokens(self) -> int:
        """Prompt positions that it takes over from a request of the same prompt: one token is left to compute."""
        return min(self.num_prompt_tokens, self.num_tokens - 1)

    def can_fork_from(self, source: Request) -> bool:
        """Return True if `source`, which has the same prompt, has computed all that this request takes over."""
        return 0 < self.num_forked_tokens <= source.num_computed_tokens and not self.needs_every_token

    @property
    def slots(self) -> list[int]:
        """Slots of all its open sequences."""
        return self.decoding.slots(self)

    def record(self, event: EventType, timestamp: float) -> None:
        """Note an event; it goes out with the request's next output."""
        self.events.append(EngineCoreEvent(event, timestamp))

    def add_prompt_logprobs(self, entries: Iterable[LogprobsEntry]) -> None:
        """Keep the prompt logprobs of a chunk until the prompt is computed; nothing if they have been sent."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.extend(TokenLogprobs(*entry) for entry in entries)

    def attach_to(self, output: EngineCoreOutput) -> None:
        """Let `output` carry the events and prompt logprobs that have waited for the request's next output."""
        if self.events:
            output.events, self.events = self.events, []
            output.num_cached_tokens = self.num_cached_tokens
        if self.prompt_logprobs is not None and self.num_computed_tokens >= self.num_prompt_tokens:
            output.new_prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None

    def conclude(self, output: EngineCoreOutput, reason: FinishReason, now: float) -> EngineCoreOutput:
        """Make `output`, which carries no token, the terminal output."""
        output.finish_reason = reason
        self.record(EventType.FINISHED, now)
        self.attach_to(output)
        return output
