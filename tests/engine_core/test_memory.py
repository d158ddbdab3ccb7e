"""The memory of the engine: its plan, the estimates of requests, and the guard of its ceiling."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from engine_process import DealerClient, EngineUnderTest, command
from patience import PATIENCE

from quire.engine_core.memory import MemoryGuard, estimate_bytes
from quire.engine_core.queue_bounds import InboundRequests, QueueBounds
from quire.engine_core.scheduling.policies import POLICIES
from quire.engine_core.scheduling.waiting import WaitingQueue
from quire.engine_core.validation import OverloadedError, RejectedError
from quire.kernels.errors import ModelError
from quire.kernels.kv_size import choose_kv_size, plan_memory
from quire.kernels.memory import PROGRAM_BYTES, MemoryPlan, reserve_above, reserve_within
from quire.kernels.operands import PlanLimits
from quire.kernels.options import LoadOptions
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import EngineCoreRequest, FinishReason, Ready, SamplingParams, StructuredOutputs

MIB = 1 << 20
PLAN = MemoryPlan(weights=10 * MIB, buffers=10 * MIB, kv=100 * MIB, reserve=80 * MIB)
LIMITS = PlanLimits(max_num_batched_tokens=2048, max_model_len=4096, block_size=32)
PAGE = 1 * MIB


def chosen(limit: int, **options: int) -> int:
    given = LoadOptions("model", memory_limit=limit, **options)  # type: ignore[arg-type]
    return choose_kv_size(given, LIMITS, PAGE, 100 * MIB, head_bytes=[PAGE // 4]).pages


def test_pages_take_what_the_ceiling_leaves() -> None:
    for limit in (700 * MIB, 1024 * MIB, 2048 * MIB):
        pages = chosen(limit)
        plan = plan_memory(LoadOptions("model", memory_limit=limit), 90 * MIB, 10 * MIB, pages * PAGE)
        assert plan.limit == limit
        assert 0 <= plan.reserve - reserve_within(limit) < 32 * PAGE  # but for whole huge pages
    assert chosen(700 * MIB) < chosen(1024 * MIB) < chosen(2048 * MIB)


def test_a_ceiling_that_cannot_be_kept_is_refused_with_what_is_needed() -> None:
    least = PROGRAM_BYTES + 100 * MIB + 128 * PAGE
    with pytest.raises(
        ModelError, match=f"weights and buffers {100 * MIB}.* one sequence of max_model_len {128 * MIB}"
    ):
        chosen(least)
    needed = least + reserve_above(least)
    assert chosen(needed) == 128
    with pytest.raises(ModelError, match=f"memory_limit={needed - MIB} is below the {needed} bytes that are needed"):
        chosen(needed - MIB)
    with pytest.raises(ModelError, match=r"KV pages as chosen.*lower kv_cache_memory_bytes or num_pages"):
        chosen(needed, num_pages=200)


def test_adapters_are_planned_above_requests_and_within_a_limit() -> None:
    plain, with_adapters = (plan_memory(LoadOptions("model"), MIB, MIB, PAGE, adapters=n) for n in (0, 32 * MIB))
    assert with_adapters.adapters == 32 * MIB
    assert with_adapters.limit - with_adapters.reserve == plain.limit - plain.reserve + 32 * MIB
    limited = plan_memory(LoadOptions("model", memory_limit=700 * MIB), MIB, MIB, PAGE, adapters=32 * MIB)
    assert (limited.limit, limited.adapters) == (700 * MIB, 0)
    assert plan_memory(LoadOptions("model"), MIB, MIB, PAGE, adapters=1 << 60).adapters < 1 << 50


def test_the_plan_without_a_limit_adds_up() -> None:
    plan = plan_memory(LoadOptions("model"), 90 * MIB, 10 * MIB, 64 * PAGE)
    assert plan.limit == PROGRAM_BYTES + 164 * MIB + plan.reserve


def request(num_tokens: int, **sampling: object) -> EngineCoreRequest:
    return EngineCoreRequest("r", [5] * num_tokens, SamplingParams(**sampling))  # type: ignore[arg-type]


def test_an_estimate_grows_with_all_that_a_message_holds() -> None:
    least = estimate_bytes(request(1))
    assert estimate_bytes(request(1001)) == least + 44_000
    assert estimate_bytes(EngineCoreRequest("r", [5], SamplingParams(), adapter="x" * 1000)) >= least + 4000
    grammar = StructuredOutputs(grammar="x" * 1000)
    assert estimate_bytes(request(1, structured_outputs=grammar)) >= least + 1000
    for field, value in {
        "allowed_token_ids": list(range(1000)),
        "logit_bias": dict.fromkeys(range(1000), 1.0),
        "bad_words_token_ids": [[1]] * 1000,
        "stop_token_ids": list(range(1000)),
    }.items():
        assert estimate_bytes(request(1, **{field: value})) >= least + 40_000


class Process:
    """Resident memory of a process as the test sets it."""

    def __init__(self) -> None:
        self.resident = 0
        self.evictable = 0
        self.num_trims = 0
        self.guard = MemoryGuard(PLAN, read=lambda: self.resident, trim=self._trim)

    def _trim(self) -> None:
        self.num_trims += 1

    def evict(self) -> None:
        self.resident -= self.evictable
        self.evictable = 0

    def check(self, now: float, *, is_idle: bool = False) -> bool:
        self.guard.check(now, self.evict, is_idle=is_idle)
        return self.guard.is_full


def test_near_the_ceiling_memory_is_given_back_before_requests_are_rejected() -> None:
    process = Process()
    process.resident, process.evictable = PLAN.limit - 1, 50 * MIB
    assert not process.check(1.0)
    assert process.num_trims == 1
    process.resident = PLAN.limit - 1
    assert process.check(2.0)
    assert process.num_trims == 1  # not again so soon
    assert process.check(8.0)
    assert process.num_trims == 2
    process.resident = PLAN.limit - 20 * MIB
    assert not process.check(9.0)


def test_an_idle_engine_serves_whatever_is_measured() -> None:
    process = Process()
    process.resident = 2 * PLAN.limit
    assert not process.check(1.0, is_idle=True)


def test_a_full_process_rejects_new_requests_but_none_that_has_been_accepted() -> None:
    process = Process()
    open_bytes = 0
    shape = EngineShape(
        vocab_size=1000, max_model_len=4096, max_num_seqs=8, max_num_batched_tokens=64, block_size=32, num_pages=500
    )
    waiting = WaitingQueue(POLICIES["fcfs"](), lambda: 0.0, lambda _: 1.0)
    room = QueueBounds(waiting, shape, process.guard, lambda: open_bytes)
    room.check(b"client", request(100))
    process.resident = PLAN.limit
    process.check(1.0)
    with pytest.raises(OverloadedError, match=f"{PLAN.limit} of {PLAN.limit} bytes are taken"):
        room.check(b"client", request(100))
    returning = request(100)
    returning.generated_token_ids = [7]
    room.check(b"client", returning)  # an engine that is gone had let it in
    process.resident = 0
    process.check(2.0)
    room.check(b"client", request(100))
    open_bytes = process.guard.request_bytes
    with pytest.raises(OverloadedError, match=f"open requests take {open_bytes} of the {open_bytes}"):
        room.check(b"client", request(100))
    open_bytes = 0
    inbound = InboundRequests()
    inbound.accept(b"client", request(100))
    assert inbound.num_bytes == estimate_bytes(request(100))
    inbound.receive(b"client", request(100))
    assert inbound.num_bytes == 0
    with pytest.raises(RejectedError, match="all open ones together may take"):
        room.check_size(request(process.guard.request_bytes // 40))


def test_a_loaded_engine_stays_below_its_ceiling(demo_model: Path) -> None:
    limit, tokens = 380 * MIB, list(range(2048))
    with EngineUnderTest(demo_model, "--memory-limit", str(limit)) as engine, DealerClient(engine.address) as client:
        assert client.first(Ready).memory_limit == limit
        count = 1200
        for number in range(count):
            words = StructuredOutputs(regex=f"[a-z ]{{{number},{number + 99}}}") if number % 9 == 0 else None
            length, logprobs = (1500, 20) if number % 50 == 0 else (20, None)
            params = SamplingParams(
                seed=number, max_tokens=4, structured_outputs=words, prompt_logprobs=logprobs, allowed_token_ids=tokens
            )
            client.send(EngineCoreRequest(f"r{number}", [260 + (n * number) % 1000 for n in range(length)], params))
        ends = [client.end(f"r{number}") for number in range(count)]
        rejected = [end.error or "" for end in ends if end.finish_reason is FinishReason.ERROR]
        assert count > len(rejected) > 0
        assert all("the engine is overloaded" in error for error in rejected)
        stats = client.wait_until_at_rest()
        assert 0 < stats["resident_bytes"] < stats["memory_limit"] == limit
        status = Path(f"/proc/{engine.process.pid}/status").read_text()
        highest = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert highest is not None
        assert int(highest[1]) * 1024 < limit


def test_an_engine_does_not_start_below_what_it_needs(demo_model: Path) -> None:
    done = subprocess.run(
        command(demo_model, "--memory-limit", "300MiB"), capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 1
    assert re.fullmatch(
        r"error: memory_limit=314572800 is below the \d+ bytes that are needed: weights and buffers \d+, KV pages as "
        r"chosen \d+, program \d+, requests \d+; raise it, or lower kv_cache_memory_bytes or num_pages; .+\n",
        done.stderr,
    )
