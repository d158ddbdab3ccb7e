"""An executor without a model: a real page pool, and tokens that depend on the sequence and its seed alone.

It is strict: a step that computes a position twice, skips a position, writes beyond its pages or exceeds a
limit fails the test.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from patience import PATIENCE

from quire.engine_core.crash_journal import CrashJournal
from quire.engine_core.decoding.beam_search import BeamSearch
from quire.engine_core.decoding.pooling import Pooling
from quire.engine_core.engine import EngineCore, EngineParts
from quire.engine_core.feature import Feature
from quire.engine_core.features import make_features
from quire.engine_core.grammar.grammars import Grammars
from quire.engine_core.host import EngineHost
from quire.engine_core.kv_tiers.tier import KvTier
from quire.engine_core.request import Request, RequestStatus
from quire.kernels.runner import Constraint, Sequences, StepInput, TokenMask
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineMessage,
    PoolingParams,
    SamplingParams,
)

Entry = tuple[list[int], list[float], int]


def next_token(tokens: list[int], seed: int, vocab_size: int) -> int:
    """Return the token that the "model" samples after `tokens`."""
    return zlib.crc32(repr((seed, tokens)).encode()) % vocab_size


def allowed_tokens(mask: TokenMask) -> list[int]:
    """Return the tokens that a written mask allows."""
    assert mask.is_ready
    return mask.token_ids


def expected_tokens(prompt: list[int], seed: int, vocab_size: int, count: int) -> list[int]:
    """The first `count` tokens of an answer, computed one sequence at a time."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed, vocab_size))
    return tokens[len(prompt) :]


def distribution(tokens: list[int], vocab_size: int) -> list[float]:
    """Log probabilities of each token after `tokens`, for beams."""
    state = zlib.crc32(repr(tokens).encode())
    logits = [zlib.crc32(token.to_bytes(4, "little"), state) / 2**30 for token in range(vocab_size)]
    log_sum = math.log(sum(math.exp(logit) for logit in logits))
    return [logit - log_sum for logit in logits]


def likeliest(tokens: list[int], count: int, vocab_size: int) -> Entry:
    """The likeliest token, and then the `count` likeliest."""
    logprobs = distribution(tokens, vocab_size)
    order = sorted(range(vocab_size), key=lambda token: -logprobs[token])[:count]
    return [order[0], *order], [logprobs[token] for token in (order[0], *order)], 1


def expected_vector(prompt: list[int], pooling_type: str) -> bytes:
    """The "embedding" of a prompt: checksums of the hidden states that were pooled."""
    states = [hidden_state(prompt[: end + 1]) for end in range(len(prompt))]
    return b"".join(states if pooling_type == "mean" else states[-1:])


def hidden_state(tokens: list[int]) -> bytes:
    """The "hidden state" of the last token, a finite little-endian f32."""
    return (zlib.crc32(repr(tokens).encode()) & 0x3FFFFFFF).to_bytes(4, "little")


def logprobs_entry(token_id: int) -> Entry:
    return [token_id], [-float(token_id)], 1


@dataclass
class PagedStepResult:
    token_ids: list[list[int]]
    pending: list[int] = field(default_factory=list)
    first_rows: list[int] = field(default_factory=list)
    lookahead_rows: dict[int, int] = field(default_factory=dict)
    entries: dict[int, Entry] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[Entry]] = field(default_factory=dict)
    pooled: dict[int, bytes] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

    def logprobs(self, row: int) -> list[Entry] | None:
        return [self.entries[row]] if row in self.entries else None


class PagedExecutor:
    """Real sequences, pages and prefix cache; a position of KV memory holds a checksum of all tokens up to it."""

    def __init__(
        self, limits: EngineShape, sequences: Sequences | None = None, memory: MutableSequence[int] | None = None
    ) -> None:
        """`memory`: 32 bits for each position of each page, if not memory that ends with the executor."""
        self.limits = limits
        self.sequences = sequences or FailingSequences(limits.num_pages, limits.block_size, limits.vocab_size)
        self.requests: Callable[[], Iterable[Request]] = list  # the running ones
        self.num_forks = 0
        self.steps: list[dict[str, tuple[int, int]]] = []  # each step's (start, count) by request id
        self.fail_sequence: str | None = None  # the request id whose next chunk fails alone
        self.fail_with_token = False  # give it a token nevertheless
        self.fail_step: Exception | None = None
        self.loses_states = False  # a step that fails has rewritten what it began with
        self.poison: str | None = None  # the request id that makes each step fail, late
        self.fail_collect: Exception | None = None
        self.num_rows_at_once = 1 << 30  # of logits: constrained rows before the last ones are sampled in the step
        self.num_late_constraints = 0  # that can't be asked in time from now on
        self._pending: dict[int, tuple[int, Request, Constraint]] = {}  # of the last step, until they are collected
        self._memory = array("I", bytes(4 * limits.num_pages * limits.block_size)) if memory is None else memory
        self._states: dict[int, list[bytes]] = {}  # by request: its pooled "hidden states"
        self._num_sent: dict[int, int] = {}  # by request: prompt tokens whose logprobs are out, the first having none

    def fork(self, slot: int, source: int, num_computed: int, num_tokens: int) -> bool:
        if not self.sequences.fork(slot, source, num_computed, num_tokens):
            return False
        size = self.limits.block_size
        page, places = divmod(num_computed, size)
        if places:
            old, new = self.sequences.pages(source)[page], self.sequences.pages(slot)[page]
            assert old != new
            for place in range(places):
                self._memory[new * size + place] = self._memory[old * size + place]
        self.num_forks += 1
        return True

    def submit(self, step: StepInput) -> PagedStepResult:
        assert not step.num_drafts
        assert not step.branches
        slots, starts, counts = step.slots, step.starts, step.counts
        assert len(set(slots)) == len(slots) <= self.limits.max_num_seqs
        assert sum(counts) <= self.limits.max_num_batched_tokens
        self.steps.append({})
        assert not self._pending
        if self.fail_step is not None:
            error, self.fail_step = self.fail_step, None
            for slot in slots if self.loses_states else ():
                self.sequences.resume(slot, 0)
            raise error
        result = PagedStepResult([[] for _ in slots])
        requests = {slot: request for request in self.requests() for slot in request.slots}
        for index, (slot, start, count) in enumerate(zip(slots, starts, counts, strict=True)):
            self._compute(index, requests[slot], slot, start, count, result)
        num_sampled = len(slots) // self.num_rows_at_once * self.num_rows_at_once
        if any(self._breaks(requests[slot]) for slot in slots):
            self._pending.clear()
            raise RuntimeError("poisoned")
        for index in [row for row in self._pending if row < num_sampled]:
            self._collect(index, *self._pending.pop(index), result)
            result.pending.remove(index)
        for index, (slot, start, count) in enumerate(zip(slots, starts, counts, strict=True)):
            if index not in result.errors and index not in self._pending:
                self.sequences.share(slot, start + count)
        return result

    def _breaks(self, request: Request) -> bool:
        return request.request_id == self.poison

    def collect(self, handle: PagedStepResult) -> PagedStepResult:
        return handle

    def collect_pending(self, result: PagedStepResult) -> dict[int, list[int]]:
        """Collect all but one at once, and then that one, if there are several."""
        if self.fail_collect is not None and len(self._pending) <= 1:
            error, self.fail_collect = self.fail_collect, None
            self._pending, result.pending = {}, []
            raise error
        collected = list(self._pending)[: max(1, len(self._pending) - 1)]
        for index in collected:
            self._collect(index, *self._pending.pop(index), result)
            result.pending.remove(index)
        return {index: result.token_ids[index] for index in collected}

    def fill(self, page: int, prefix: list[int]) -> None:
        """Write to a page what computing the last tokens of a prefix would."""
        size = self.limits.block_size
        checksum, first = 0, len(prefix) - size
        for position, token in enumerate(prefix):
            checksum = zlib.crc32(token.to_bytes(4, "little"), checksum)
            if position >= first:
                self._memory[page * size + position - first] = checksum

    def first_checksum(self, request: Request) -> int:
        """Return the checksum of what the KV of a request depends on besides tokens."""
        return 0

    def _collect(
        self, index: int, slot: int, request: Request, constraint: Constraint, result: PagedStepResult
    ) -> None:
        tokens = self.sequences.tokens(slot)
        is_late = self.num_late_constraints > 0
        self.num_late_constraints -= is_late
        if index in result.errors:
            return
        if not is_late:
            try:
                token = self._sample(tokens, request, constraint)
            except RuntimeError as error:
                result.errors[index] = str(error)
                return
            constraint.follow(token)
            span = [token]
            while request.sampling.logprobs is None and (forced := constraint.take_forced()) is not None:
                span.append(forced)
            for each in span:
                self.sequences.append(slot, each)
            result.token_ids[index] = span
            self._add_logprobs(index, None if request.sampling.logprobs is None else logprobs_entry(token), result)
        self.sequences.share(slot, len(tokens) - is_late)

    def _sample(self, tokens: list[int], request: Request, constraint: Constraint) -> int:
        """Guesses first, as the native runner does."""
        assert constraint.wait(PATIENCE)
        guesses = [next_token(tokens, seed, self.limits.vocab_size) for seed in (request.seed, ~request.seed)]
        allowed = (token for token in guesses if constraint.allows(token))
        if (token := next(allowed, None)) is not None:
            return token
        others = [token for token in allowed_tokens(constraint.mask) if token < self.limits.vocab_size]
        return others[guesses[0] % len(others)]

    def _compute(
        self,
        index: int,
        request: Request,
        slot: int,
        start: int,
        count: int,
        result: PagedStepResult,
    ) -> None:
        tokens, end = self.sequences.tokens(slot), start + count
        pages = self.sequences.pages(slot)
        size, memory = self.limits.block_size, self._memory
        assert 0 < count <= min(len(tokens), len(pages) * size) - start
        checksum = self.first_checksum(request)
        for position, token in enumerate(tokens[:end]):
            checksum = zlib.crc32(token.to_bytes(4, "little"), checksum)
            place = pages[position // size] * size + position % size
            if position >= start:
                assert position >= end - count
                memory[place] = checksum
            assert memory[place] == checksum
        self.steps[-1][request.request_id] = (start, count)
        if self.fail_sequence == request.request_id:
            self.fail_sequence = None
            result.errors[index] = "the logits are not a number"
            if request.constraint is not None and end == len(tokens):  # its sample may be pending
                result.pending.append(index)
                self._pending[index] = slot, request, request.constraint
            elif self.fail_with_token:
                result.token_ids[index] = [0]
            return
        if request.sampling.prompt_logprobs is not None:
            self._add_prompt_logprobs(index, request, end, result)
        if isinstance(request.decoding, Pooling):
            self._pool(index, request, request.decoding.pooling_type, start, end, result)
        if end < len(tokens) or isinstance(request.decoding, Pooling):
            return
        if request.constraint is not None:
            result.pending.append(index)
            self._pending[index] = slot, request, request.constraint
            return
        token = next_token(tokens, request.seed, self.limits.vocab_size)
        entry = None if request.sampling.logprobs is None else logprobs_entry(token)
        if isinstance(request.decoding, BeamSearch):
            entry = likeliest(tokens, request.decoding.num_candidates, self.limits.vocab_size)
            token = entry[0][0]
        self.sequences.append(slot, token)
        result.token_ids[index] = [token]
        self._add_logprobs(index, entry, result)

    @staticmethod
    def _add_logprobs(index: int, entry: Entry | None, result: PagedStepResult) -> None:
        if entry is not None:
            result.entries[index] = entry

    def _pool(
        self, index: int, request: Request, pooling_type: str, start: int, end: int, result: PagedStepResult
    ) -> None:
        """Each position once a request, and all of them for a mean."""
        prompt = request.prompt_token_ids
        first = 0 if pooling_type == "mean" else len(prompt) - 1
        states = self._states.setdefault(request.number, [])
        assert start <= first + len(states)
        for position in range(first + len(states), end):
            states.append(hidden_state(prompt[: position + 1]))
        if end == len(prompt):
            result.pooled[index] = b"".join(states)

    def _add_prompt_logprobs(self, index: int, request: Request, end: int, result: PagedStepResult) -> None:
        """Each position once a request, as the native runner does, whatever is computed again."""
        sent = self._num_sent.get(request.number, 1)
        if entries := [logprobs_entry(token) for token in request.prompt_token_ids[sent : end + 1]]:
            result.prompt_logprobs[index] = entries
            self._num_sent[request.number] = sent + len(entries)


class FailingSequences(Sequences):
    """Sequences of which one can't be opened, on request."""

    fail_open: str | None = None

    def open(self, *arguments: Any, **options: Any) -> int:
        if self.fail_open is not None:
            text, self.fail_open = self.fail_open, None
            raise ValueError(text)
        return super().open(*arguments, **options)


class Engine:
    """An EngineCore over a PagedExecutor, with the messages to each client. `step` checks all accounts."""

    def __init__(
        self,
        grammars: Grammars | None = None,
        make_tier: Callable[[PagedExecutor], KvTier] | None = None,
        *,
        is_supervised: bool = False,
        journal: CrashJournal | None = None,
        features: Sequence[Feature] = (),
        **limits: Any,
    ) -> None:
        sizes: dict[str, Any] = {
            "vocab_size": 1000,
            "max_model_len": 256,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "block_size": 4,
            "num_pages": 100,
        }
        self.limits = EngineShape(**(sizes | limits))
        self.executor = PagedExecutor(self.limits)
        self.read_clock: Callable[[], float] = lambda: self.now
        self.now: float = 0.0  # of a clock that stands still, so that steps seem to take no time
        self.num_wakes = 0
        self.core = EngineCore(
            self.executor,
            self.limits,
            self.send,
            EngineParts(
                [
                    *make_features(
                        self.executor.sequences, self.limits, self.send, lambda: self.read_clock(), journal=journal
                    ),
                    *features,
                ],
                grammars,
                [] if make_tier is None else [make_tier(self.executor)],
            ),
            EngineHost(self.wake, is_supervised=is_supervised),
            clock=lambda: self.read_clock(),
        )
        self.executor.requests = lambda: self.core.scheduler.running
        self.sent: dict[bytes, list[EngineMessage]] = {}

    def wake(self) -> None:
        self.num_wakes += 1

    def expect_no_output(self) -> None:
        """Make the scheduler admit every request that has pages for its prompt, so that pages run out."""
        admission = self.core.scheduler.admission
        admission.output_tokens = admission.watermark = 0
        admission.decoded = lambda num_tokens: None  # type: ignore[method-assign]

    def send(self, client_id: bytes, message: EngineMessage) -> None:
        self.sent.setdefault(client_id, []).append(message)

    def add(self, request_id: str, prompt: list[int], client_id: bytes = b"client", **options: Any) -> None:
        """A request with seed 0 that ends by its length alone, unless `options` say otherwise."""
        own = {name: options.pop(name) for name in list(options) if name in EngineCoreRequest.__struct_fields__}
        params = SamplingParams(**({"seed": 0} | options))
        self.core.receive(client_id, EngineCoreRequest(request_id, prompt, params, **own))

    def embed(
        self,
        request_id: str,
        prompt: list[int],
        client_id: bytes = b"client",
        pooling_type: Literal["last", "mean"] = "last",
        **options: Any,
    ) -> None:
        """A request for an embedding."""
        pooling = PoolingParams(pooling_type=pooling_type)
        self.core.receive(
            client_id, EngineCoreRequest(request_id, prompt, SamplingParams(), pooling=pooling, **options)
        )

    def step(self) -> dict[str, tuple[int, int]]:
        """Step, and return the (start, count) that it computed of each request."""
        num_steps = len(self.executor.steps)
        self.core.step()
        self.check_accounts()
        return self.executor.steps[-1] if len(self.executor.steps) > num_steps else {}

    def finish(self, max_steps: int = 3000) -> int:
        """Steps until nothing is left to do; returns how many steps that took."""
        for count in range(max_steps):
            if not self.core.has_requests:
                self.core.flush()
                self.core.scheduler.pins.unpin_all()
                self.check_accounts()
                assert self.executor.sequences.held_pages == 0
                return count
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")

    def outputs(self, request_id: str, client_id: bytes = b"client") -> list[EngineCoreOutput]:
        messages = self.sent.get(client_id, [])
        batches = [message.outputs for message in messages if isinstance(message, EngineCoreOutputs)]
        return [output for batch in batches for output in batch if output.request_id == request_id]

    def tokens(self, request_id: str, client_id: bytes = b"client") -> list[int]:
        return [token for output in self.outputs(request_id, client_id) for token in output.new_token_ids]

    def end(self, request_id: str, client_id: bytes = b"client") -> EngineCoreOutput:
        """The terminal output; it must be the last, and the only one."""
        outputs = self.outputs(request_id, client_id)
        assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
        return outputs[-1]

    def end_now(self, request_id: str) -> EngineCoreOutput:
        """Return the terminal output without another step."""
        self.core.flush()
        return self.end(request_id)

    def check_accounts(self) -> None:
        """Check that every page is free, cached, or held by a request, a pin or a fetch; that the queue is in order."""
        check_accounts(self.core, self.limits)


def check_accounts(core: EngineCore, limits: EngineShape) -> None:
    """Check that every page is free, cached, or held by a request, a pin or a fetch; that the queue is in order."""
    sequences, scheduler, block_size = core.sequences, core.scheduler, limits.block_size
    slots = [slot for request in scheduler.running for slot in request.slots] + scheduler.pins.slots
    slots += [transfer.slot for transfer in scheduler.fetches._open.values()]
    held = {page for slot in slots for page in sequences.pages(slot)}
    assert len(held) == sequences.held_pages
    assert sequences.free_pages + sequences.cached_pages + sequences.held_pages == limits.num_pages
    assert sequences.tree.size >= sequences.cached_pages
    for request in [*scheduler.running, *scheduler.waiting]:
        pages = [page for slot in request.slots for page in sequences.pages(slot)]
        assert request.num_reserved_tokens * len(request.slots) == len(pages) * block_size
        assert (request.status is RequestStatus.RUNNING) == (request in scheduler.running)
        assert request.status is RequestStatus.RUNNING or not pages
        assert not request.is_finished
        assert request.num_new_tokens > 0
    assert scheduler.waiting.num_tokens == sum(request.num_prompt_tokens for request in scheduler.waiting)
    if limits.scheduling_policy == "fcfs":
        ready = list(scheduler.waiting.ready())
        for tenant in {request.tenant for request in ready}:
            numbers = [request.number for request in ready if request.tenant == tenant]
            assert numbers == sorted(numbers)
