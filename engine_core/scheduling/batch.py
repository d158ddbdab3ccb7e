"""The batch that one step computes, and the running requests by what the step does for them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from quire.engine_core.request import Request
from quire.kernels.runner import Sequences
from quire.kernels.step import Branch, StepInput
from quire.protocol.messages import EventType


class ScheduleEvent(NamedTuple):
    """The start or preemption of a request; `num_cached_tokens` of it need not be computed."""

    request: Request
    type: EventType
    timestamp: float
    num_cached_tokens: int = 0


@dataclass(slots=True)
class RunningRequests:
    """The running requests. Each is in one of the first three lists, in the order in which it started."""

    decodes: list[Request] = field(default_factory=list)  # decoding requests of one sequence each
    wide_decodes: list[Request] = field(default_factory=list)  # decoding requests of several sequences each
    prefills: list[Request] = field(default_factory=list)
    growing: list[Request] = field(default_factory=list)  # requests that may lack pages for their next tokens

    @classmethod
    def of(cls, running: Iterable[Request], sequences: Sequences) -> RunningRequests:
        """Sort all of them in one pass."""
        requests = cls()
        requests.add(running, sequences)
        return requests

    def add(self, running: Iterable[Request], sequences: Sequences) -> None:
        """Sort these too. Each step asks about all requests: keep it short."""
        requests = list(running)
        slots = [request.slot for request in requests]
        wide = [request for request in requests if request.decoding.width > 1]
        prefills = [requests[index] for index in sequences.prefilling(slots)]
        self.prefills += prefills
        self.growing += dict.fromkeys([requests[index] for index in sequences.growing(slots)] + wide)
        if not wide and not prefills:
            self.decodes += requests
            return
        in_prefill = {*prefills}
        decodes = [request for request in requests if request not in in_prefill]
        self.decodes += [request for request in decodes if request.decoding.width == 1]
        self.wide_decodes += [request for request in decodes if request.decoding.width > 1]

    @property
    def num_decode_requests(self) -> int:
        """Number of decoding requests."""
        return len(self.decodes) + len(self.wide_decodes)

    @property
    def num_decode_rows(self) -> int:
        """Rows of the step for decoding requests: one for each sequence."""
        return len(self.decodes) + sum(len(request.slots) for request in self.wide_decodes)


@dataclass(slots=True)
class Batch:
    """One step, and the requests that it is for.

    Rows of decoding requests come first, one for each sequence, then one for each prompt; `rows[j]` is the first row of
    `requests[j]`.
    """

    requests: list[Request] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    step: StepInput = field(default_factory=StepInput)
    first_rows: Sequence[int] = ()  # index in the step of the first token that each row keeps; empty: contiguous
    lookahead_rows: Mapping[int, int] = field(default_factory=dict)  # index in the step of each row's lookahead token
    num_single_decodes: int = 0  # decoding requests of one sequence, which come first
    num_decode_requests: int = 0
    num_decode_rows: int = 0
    accepted: list[int] = field(default_factory=list)  # number of accepted drafts of each row; empty: no row has drafts
    prefill_cost: float = 0.0  # cost of the prompt chunks, as PrefillBudget counts it
    num_cached_tokens: int = 0  # cached tokens of the requests that first start in this step
    events: list[ScheduleEvent] = field(default_factory=list)  # starts and preemptions since the step before
    failed: list[tuple[Request, str]] = field(default_factory=list)  # requests to release, as they could not be opened

    def fill(self, running: RunningRequests, shares: Sequence[tuple[Request, int]]) -> None:
        """Add a token for each decoding sequence, and these chunks of prompts.

        Rows of one adapter follow one another: kernels compute them together.
        """
        decodes, step = running.decodes, self.step
        if any(map(attrgetter("adapter"), decodes)):
            decodes = sorted(decodes, key=attrgetter("adapter"))
        self.num_single_decodes = len(decodes)
        self.num_decode_requests, self.num_decode_rows = running.num_decode_requests, running.num_decode_rows
        self.requests = decodes + running.wide_decodes + [request for request, _ in shares]
        step.counts = [1] * self.num_decode_rows + [count for _, count in shares]
        if not running.wide_decodes:
            self.rows = list(range(len(self.requests)))
            step.slots = [request.slot for request in self.requests]
            step.starts = [request.num_tokens - 1 for request in decodes]
            step.starts += [request.num_computed_tokens for request, _ in shares]
            return
        for request in self.requests:
            self.rows.append(len(step.slots))
            slots = request.slots
            step.slots += slots
            step.starts += [request.num_computed_tokens] * len(slots)

    def add_drafts(self, drafts: list[int], branches: list[Branch]) -> None:
        """Add so many drafts to the first rows, whose sequences have them, and branches beside these."""
        self.step.add_drafts(drafts, branches)
        self.accepted = [0] * len(self.step.counts)

    def part(self, indices: Sequence[int]) -> Batch:
        """Return the batch of the requests at these indices, without their drafts."""
        part = Batch()
        for index in indices:
            part.requests.append(self.requests[index])
            part.rows.append(len(part.step.slots))
            part.step.add(self.step.rows(self._rows_of(index)))
        return part

    @property
    def num_branch_tokens(self) -> int:
        """Tokens that the step computes for branches, each from the sequence's last one on."""
        return sum(1 + max(len(tokens), 1) for _, tokens in self.step.branches)

    def index_of(self, row: int) -> int:
        """Return the index of the request that a row belongs to."""
        return bisect_right(self.rows, row) - 1

    def num_tokens(self, index: int) -> int:
        """Return how many tokens the step computes of a request, all its sequences together."""
        return sum(self.step.counts[self._rows_of(index)])

    def starts_of(self, index: int) -> list[int]:
        """Return the first token that the step computes of each sequence of a request."""
        return self.step.starts[self._rows_of(index)]

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts, those computed again after a preemption included."""
        return sum(self.step.counts) - self.num_decode_rows - sum(self.step.num_drafts)

    def _rows_of(self, index: int) -> slice:
        end = self.rows[index + 1] if index + 1 < len(self.rows) else len(self.step.counts)
        return slice(self.rows[index], end)
