"""Fair shares of tenants: whose requests start next, under every policy."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from paged_executor import Engine

from quire.engine_core.decoding import decoding_type
from quire.engine_core.request import Request
from quire.engine_core.scheduling.policies import AGING_SECONDS, POLICIES
from quire.engine_core.scheduling.waiting import WaitingQueue
from quire.kernels.runner import Sequences
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import EngineCoreRequest, SamplingParams

LIMITS = EngineShape(1000, 4096, 8, 64, block_size=32, num_pages=1000)
SEQUENCES = Sequences(1, 32, 1000)
TENANTS = ("a", "b", "c")


@dataclass
class Queue:
    """A waiting queue whose requests cost exactly their prompts."""

    policy: str = "fcfs"
    now: float = 0.0
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.waiting = WaitingQueue(POLICIES[self.policy](), lambda: self.now, lambda each: each.num_prompt_tokens)

    def add(self, tenant: str, num_tokens: int = 1, priority: int = 0) -> Request:
        message = EngineCoreRequest("r", [1] * num_tokens, SamplingParams(), priority=priority, tenant=tenant)
        request = Request.from_message(
            b"client", message, decoding_type(message)(message, LIMITS), seed=0, now=self.now, limits=LIMITS,
            sequences=SEQUENCES,
        )  # fmt: skip
        request.number = next(self.numbers)
        self.waiting.add(request)
        return request

    def start_next(self) -> Request:
        request = next(iter(self.waiting.ready()))
        self.waiting.start(request)
        return request


def tenants_of(requests: list[Request]) -> str:
    return "".join(str(request.tenant) for request in requests)


ADDITIONS = st.tuples(st.sampled_from(TENANTS), st.integers(1, 20), st.integers(-1, 1))
"""Tenant, prompt tokens and priority of a request."""


@given(policy=st.sampled_from(list(POLICIES)), requests=st.lists(st.tuples(st.integers(1, 20), st.integers(-5, 5))))
def test_a_tenant_alone_has_the_order_of_the_policy(policy: str, requests: list[tuple[int, int]]) -> None:
    queue, added = Queue(policy), []
    for num_tokens, priority in requests:
        queue.now += 0.7
        added.append(queue.add("a", num_tokens, priority))
    expected = sorted(added, key=lambda request: (queue.waiting.policy.key(request), request.number))
    assert list(queue.waiting.ready()) == expected
    assert [queue.start_next() for _ in added] == expected


@given(
    policy=st.sampled_from(list(POLICIES)),
    rounds=st.lists(st.tuples(st.lists(ADDITIONS, max_size=8), st.integers(0, 6))),
)
def test_every_request_starts_once_and_tenants_keep_their_order(
    policy: str, rounds: list[tuple[list[tuple[str, int, int]], int]]
) -> None:
    queue, added, started = Queue(policy), list[Request](), list[Request]()
    for additions, num_starts in [*rounds, ([], 1 << 20)]:
        queue.now += 0.5
        added += [queue.add(*addition) for addition in additions]
        in_turn = list(queue.waiting.ready())
        assert set(in_turn) == set(added) - set(started)
        assert queue.waiting.num_tenants == len({request.tenant for request in in_turn})
        for tenant in TENANTS:
            own = [request for request in in_turn if request.tenant == tenant]
            assert own == sorted(own, key=lambda request: (queue.waiting.policy.key(request), request.number))
            assert queue.waiting.load_of(tenant) == (len(own), sum(request.num_prompt_tokens for request in own))
        picked = [queue.start_next() for _ in in_turn[:num_starts]]
        assert picked == in_turn[:num_starts]  # as if each started when it was taken
        started += picked
    assert len(queue.waiting) == queue.waiting.num_tokens == 0
    event(f"tenants: {len({request.tenant for request in added})}")


@given(
    costs=st.fixed_dictionaries({tenant: st.lists(st.integers(1, 30), min_size=40, max_size=40) for tenant in TENANTS}),
    late=st.integers(0, 30),
)
def test_tenants_that_wait_get_the_same_number_of_tokens(costs: dict[str, list[int]], late: int) -> None:
    queue, served = Queue(), Counter[str]()
    for cost in costs["a"]:
        queue.add("a", cost)
    for cost in costs["b"]:
        queue.add("b", cost)
    for _ in range(late):
        queue.start_next()
    for cost in costs["c"]:
        queue.add("c", cost)
    waiting = Counter(str(request.tenant) for request in queue.waiting.ready())
    while min(waiting[tenant] for tenant in TENANTS):
        request = queue.start_next()
        waiting[str(request.tenant)] -= 1
        served[str(request.tenant)] += request.num_prompt_tokens
        assert max(served.values()) - min(served[tenant] for tenant in TENANTS) <= 60  # a largest request of each


def test_an_absence_earns_nothing() -> None:
    queue = Queue()
    queue.add("b")
    for _ in range(30):
        queue.add("a")
    assert tenants_of([queue.start_next() for _ in range(20)]) == "ba" + "a" * 18
    for _ in range(5):
        queue.add("b")
    assert tenants_of([queue.start_next() for _ in range(10)]) == "bbabababaa"


def test_all_are_even_once_no_request_waits() -> None:
    queue = Queue()
    for _ in range(9):
        queue.add("a")
    queue.add("b")
    while queue.waiting:
        queue.start_next()
    for _ in range(2):
        queue.add("a")
        queue.add("b")
    first = tenants_of([queue.start_next() for _ in range(4)])
    assert first in ("abab", "baba")


def test_actual_tokens_replace_the_expected_ones() -> None:
    queue = Queue()
    for _ in range(4):
        queue.add("a")
        queue.add("b")
    long, short = queue.start_next(), queue.start_next()
    long.num_tokens += 2
    for request in (long, short):
        queue.waiting.forget(request)
    assert tenants_of([queue.start_next() for _ in range(6)]) == "bbabaa"


def test_cached_tokens_cost_nothing() -> None:
    queue = Queue()
    for _ in range(3):
        queue.add("a", 10)
        queue.add("b", 10)
    queue.start_next()
    cached = next(iter(queue.waiting.ready()))
    cached.num_cached_tokens = 10
    queue.waiting.start(cached)
    assert tenants_of([cached, queue.start_next(), queue.start_next()]) == "bba"


def test_a_tenant_with_urgent_requests_comes_first_and_equals_take_turns() -> None:
    queue = Queue("priority")
    for _ in range(3):
        queue.add("a", priority=1)
        queue.add("b", priority=1)
        queue.add("c", priority=0)
    assert tenants_of(list(queue.waiting.ready())) == "cccababab"
    queue.add("b", priority=0)
    assert tenants_of(list(queue.waiting.ready())) == "bcccaababb"


def test_no_tenant_starves_behind_urgent_requests() -> None:
    queue, waited = Queue("priority"), Counter[str]()
    queue.add("b", priority=3)
    for _ in range(100):
        queue.add("a", priority=0)
    while not waited["b"]:
        waited[str(queue.start_next().tenant)] += 1
        queue.now += AGING_SECONDS / 4
    assert waited["a"] == 13  # 30 seconds


def test_tenants_that_come_and_go_are_forgotten() -> None:
    queue = Queue()
    for _ in range(10_000):
        queue.add("patient")
    for index in range(5000):
        queue.add(f"visitor {index}", num_tokens=3)
        for _ in range(2):
            queue.start_next()
    assert len(queue.waiting._shares._tenants) < 200


def steps_to_first_token(engine: Engine, request_id: str, client_id: bytes) -> int:
    for count in range(1, 100):
        engine.step()
        if engine.tokens(request_id, client_id):
            return count
    raise AssertionError("no token in 100 steps")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flood_of_one_client_delays_another_by_a_few_steps(policy: str) -> None:
    engine = Engine(scheduling_policy=policy, max_waiting_requests=10_000, max_num_seqs=4)
    for index in range(6000):
        engine.add(str(index), [index % 7, index % 1000], b"flood", max_tokens=3)
    for _ in range(5):
        engine.step()
        engine.now += 1.0
    engine.add("alone", [5] * 20, b"other", max_tokens=3)
    assert steps_to_first_token(engine, "alone", b"other") <= 4  # some of the four must end
    assert len(engine.core.scheduler.running) == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_two_floods_share_the_engine(policy: str) -> None:
    """The one has long answers, so it gets fewer of them."""
    engine = Engine(scheduling_policy=policy, max_num_seqs=4, num_pages=400)
    for index in range(300):
        engine.add(str(index), [1, index], b"long", max_tokens=20)
        engine.add(str(index), [2, index], b"short", max_tokens=2)
    tokens = Counter[bytes]()
    for _ in range(150):
        engine.step()
    for client_id in (b"long", b"short"):
        tokens[client_id] = sum(len(engine.tokens(str(index), client_id)) for index in range(300))
    assert tokens[b"long"] + 2 * tokens[b"short"] > 400
    assert 0.7 < (tokens[b"long"] * 22 / 20) / (tokens[b"short"] * 4 / 2) < 1.4


def busy_engine(policy: str, max_num_seqs: int, num_pages: int) -> Engine:
    """Return an engine whose slots or pages are all taken by one client with long generations."""
    engine = Engine(scheduling_policy=policy, max_num_seqs=max_num_seqs, num_pages=num_pages)
    for index in range(8):
        engine.add(str(index), [1, index], b"flood", max_tokens=250)
    for _ in range(40):
        engine.step()
    return engine


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("max_num_seqs", "num_pages"), [(8, 600), (64, 150)], ids=["slots", "pages"])
def test_long_generations_give_way_to_another_client_at_once(policy: str, max_num_seqs: int, num_pages: int) -> None:
    engine = busy_engine(policy, max_num_seqs, num_pages)
    before = len(engine.core.scheduler.running)
    engine.add("alone", [5] * 20, b"other", max_tokens=100)
    assert steps_to_first_token(engine, "alone", b"other") <= 3
    running = [request.client_id for request in engine.core.scheduler.running]
    assert running.count(b"flood") >= before - 2  # one slot, and the pages of a prompt
    preemptions = engine.core.scheduler.counters.preemptions
    for _ in range(60):
        engine.step()
    assert len(engine.tokens("alone", b"other")) > 60
    assert max_num_seqs > 8 or engine.core.scheduler.counters.preemptions == preemptions == 1


def test_a_client_whose_requests_run_one_at_a_time_keeps_its_slot() -> None:
    """Each of as many clients as there are slots has one request: nobody gives way to one more."""
    engine = Engine(max_num_seqs=4)
    for name in (b"one", b"two", b"three", b"four", b"five"):
        engine.add("a", [1, 2], name, max_tokens=60)
    for _ in range(59):
        engine.step()
    assert engine.core.scheduler.counters.preemptions == 0
    assert not engine.tokens("a", b"five")
    assert steps_to_first_token(engine, "a", b"five") <= 4


def test_a_beam_search_goes_on_while_other_requests_of_its_client_give_way() -> None:
    engine = Engine(max_num_seqs=8, num_pages=400)
    engine.add("beams", [1, 2], b"flood", max_tokens=60, beam_width=7)
    engine.add("single", [1, 3], b"flood", max_tokens=60)
    for _ in range(20):
        engine.step()
    engine.add("a", [4, 5], b"other", max_tokens=30)
    assert steps_to_first_token(engine, "a", b"other") <= 3
    assert {request.request_id for request in engine.core.scheduler.running} == {"beams", "a"}
    assert engine.core.scheduler.counters.preemptions == 1
