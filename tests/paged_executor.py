"""An executor without a model: a real page pool, and tokens that depend on the sequence and its seed alone.

It is strict: a step that computes what was computed already, skips a position, writes beyond its pages or exceeds a
limit fails the test.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from quire.engine_core.engine import EngineCore
from quire.engine_core.limits import EngineLimits
from quire.engine_core.request import NO_SLOT, Request, RequestStatus
from quire.protocol.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineMessage,
    SamplingParams,
)

Entry = tuple[list[int], list[float], int]


def next_token(tokens: list[int], seed: int, vocab_size: int) -> int:
    """What the "model" says after `tokens`."""
    return zlib.crc32(repr((seed, tokens)).encode()) % vocab_size


def expected_tokens(prompt: list[int], seed: int, vocab_size: int, count: int) -> list[int]:
    """The first `count` tokens of an answer, computed one sequence at a time."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed, vocab_size))
    return tokens[len(prompt) :]


def logprobs_entry(token_id: int) -> Entry:
    return [token_id], [-float(token_id)], 1


@dataclass
class Result:
    token_ids: list[int]
    logprobs: list[Entry | None] | None = None
    prompt_logprobs: dict[int, list[Entry]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


@dataclass
class Slot:
    request: Request
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    told: int = 1  # prompt tokens whose logprobs are out, the first having none; computing them again tells nothing


class PagedExecutor:
    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.free = list(range(limits.num_pages))
        self.slots: dict[int, Slot] = {}
        self.steps: list[dict[str, tuple[int, int]]] = []  # each step's (start, count) by request id
        self.fail_open: str | None = None
        self.fail_sequence: str | None = None  # the request id whose next chunk fails alone
        self.fail_with_token = False  # whether a token is given for it nevertheless
        self.fail_step: Exception | None = None
        self._num_opened = 0

    @property
    def free_pages(self) -> int:
        return len(self.free)

    @property
    def held_pages(self) -> int:
        return sum(len(slot.pages) for slot in self.slots.values())

    @property
    def cached_pages(self) -> int:
        return 0

    def open(self, request: Request) -> int:
        if self.fail_open is not None:
            text, self.fail_open = self.fail_open, None
            raise ValueError(text)
        self._num_opened += 1
        self.slots[self._num_opened] = Slot(request, list(request.prompt_token_ids))
        return self._num_opened

    def reserve(self, slot: int, num_tokens: int) -> bool:
        pages = self.slots[slot].pages
        wanted = -(-num_tokens // self.limits.page_size) - len(pages)
        if wanted > len(self.free):
            return False
        pages.extend(self.free.pop() for _ in range(wanted))
        return True

    def release_pages(self, slot: int) -> None:
        self.free.extend(self.slots[slot].pages)
        self.slots[slot].pages = []
        self.slots[slot].computed = 0

    def close(self, slot: int) -> None:
        self.release_pages(slot)
        del self.slots[slot]

    def execute(self, slots: list[int], starts: list[int], counts: list[int]) -> Result:
        assert len(set(slots)) == len(slots) <= self.limits.max_num_seqs
        assert sum(counts) <= self.limits.max_num_batched_tokens
        self.steps.append({})
        if self.fail_step is not None:
            error, self.fail_step = self.fail_step, None
            raise error
        result = Result([])
        for index, (slot, start, count) in enumerate(zip(slots, starts, counts, strict=True)):
            self._compute(index, self.slots[slot], start, count, result)
        return result

    def _compute(self, index: int, slot: Slot, start: int, count: int, result: Result) -> None:
        request, end = slot.request, start + count
        assert count > 0
        assert start == slot.computed
        assert end <= min(len(slot.tokens), len(slot.pages) * self.limits.page_size)
        self.steps[-1][request.request_id] = (start, count)
        if self.fail_sequence == request.request_id:
            self.fail_sequence = None
            result.errors[index] = "the logits are not a number"
            result.token_ids.append(0 if self.fail_with_token else -1)
            return
        slot.computed = end
        if request.sampling.prompt_logprobs is not None:
            self._tell_prompt(index, slot, result)
        if end < len(slot.tokens):
            result.token_ids.append(-1)
            return
        token = next_token(slot.tokens, request.seed, self.limits.vocab_size)
        slot.tokens.append(token)
        result.token_ids.append(token)
        if request.sampling.logprobs is not None:
            result.logprobs = result.logprobs or [None] * index
        if result.logprobs is not None:
            wanted = request.sampling.logprobs is not None
            result.logprobs.extend([None] * (index - len(result.logprobs)))
            result.logprobs.append(logprobs_entry(token) if wanted else None)

    @staticmethod
    def _tell_prompt(index: int, slot: Slot, result: Result) -> None:
        """Each position once a slot, as the native runner does, whatever is computed again."""
        if entries := [logprobs_entry(token) for token in slot.request.prompt_token_ids[slot.told : slot.computed + 1]]:
            result.prompt_logprobs[index] = entries
            slot.told += len(entries)


class Engine:
    """An EngineCore over a PagedExecutor, with what each client has been sent. `step` checks all accounts."""

    def __init__(self, **limits: int) -> None:
        sizes = {
            "vocab_size": 1000,
            "max_model_len": 256,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "page_size": 4,
            "num_pages": 100,
        }
        self.limits = EngineLimits(**(sizes | limits))
        self.executor = PagedExecutor(self.limits)
        self.core = EngineCore(self.executor, self.limits, self.send)
        self.sent: dict[bytes, list[EngineMessage]] = {}
        self._in_order: list[Request] = []

    def send(self, client_id: bytes, message: EngineMessage) -> None:
        self.sent.setdefault(client_id, []).append(message)

    def add(self, request_id: str, prompt: list[int], client_id: bytes = b"client", **sampling: object) -> None:
        """A request with seed 0 that ends by its length alone, unless `sampling` says otherwise."""
        eos = sampling.pop("eos_token_ids", [])
        params = SamplingParams(**({"seed": 0} | sampling))  # type: ignore[arg-type]
        self.core.receive(client_id, EngineCoreRequest(request_id, prompt, params, eos))  # type: ignore[arg-type]

    def step(self) -> dict[str, tuple[int, int]]:
        """Steps, and returns what it computed."""
        num_steps = len(self.executor.steps)
        self.core.step()
        self.check_accounts()
        return self.executor.steps[-1] if len(self.executor.steps) > num_steps else {}

    def finish(self, max_steps: int = 3000) -> int:
        """Steps until nothing is left to do; returns how many steps that took."""
        for count in range(max_steps):
            if not self.core.has_requests:
                self.core.flush()
                assert self.executor.free_pages == self.limits.num_pages
                assert not self.executor.slots
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

    def check_accounts(self) -> None:
        """Every page and slot belongs to exactly one live request; the queues are in order of arrival."""
        executor, scheduler, page_size = self.executor, self.core.scheduler, self.limits.page_size
        held = [page for slot in executor.slots.values() for page in slot.pages]
        assert sorted(held + executor.free) == list(range(self.limits.num_pages))
        live = [*scheduler.running, *scheduler.waiting]
        assert {r.slot for r in live if r.slot != NO_SLOT} == set(executor.slots)
        for request in live:
            pages = executor.slots[request.slot].pages if request.slot != NO_SLOT else []
            assert request.num_reserved_tokens == len(pages) * page_size
            assert (request.status is RequestStatus.RUNNING) == (request in scheduler.running)
            assert request.status is RequestStatus.RUNNING or not pages
            assert not request.status.is_finished
            assert request.num_new_tokens > 0
        known = [request for request in self._in_order if request in live]
        assert live[: len(known)] == known  # those who came later stand behind
        self._in_order = live
