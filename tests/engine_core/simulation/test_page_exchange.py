"""Simulated engines that fetch prefixes from one another: what comes, when, and what is computed instead."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulations import BLOCK, STEP_TIME, FleetRun, chats, crowd, request, setup, times_of

from quire.engine_core.simulation.engine import EngineTiming, SimulatedAnswer, SimulatedEngine, limits_of
from quire.engine_core.simulation.page_exchange import PageNetwork
from quire.protocol.messages import ClientMessage
from quire.protocol.routing.routers import ROUTERS
from quire.protocol.simulation import FetchTime, SimulatedRequest, StepWork

PAGE = 32
QUICK = FetchTime(0.0, answer=4e-3, token=1e-6)


class Pair:
    """Two engines that know each other, without a router: a test says where each request goes, and with what source."""

    def __init__(self, fetch: FetchTime = QUICK, **changes: Any) -> None:
        limits = limits_of(setup(**changes).engine)
        self.answers: dict[int, SimulatedAnswer] = {}
        network = PageNetwork(fetch, limits.block_size, self._post)
        self.engines = [
            SimulatedEngine(limits, EngineTiming(STEP_TIME), on_end=self._end, network=network) for _ in range(2)
        ]
        for number, engine in enumerate(self.engines):
            engine.introduce([str(1 - number)])

    def connect(self) -> None:
        """Let engine 1 ask for pages of the other once, as the first request does not wait for the connection."""
        self.send(request(1000, 0.0, 2 * PAGE, 1, [-1]), 1, source=0)
        self.run()

    def send(self, one: SimulatedRequest, engine: int, source: int | None = None) -> None:
        self.engines[engine].send(one, one.arrival, one.arrival, source)

    def run(self, until: float = math.inf) -> None:
        """Take the steps that begin before that time."""
        while (engine := min(self.engines, key=lambda each: each.next_step)).next_step < until:
            engine.step()

    def serve(self, one: SimulatedRequest, engine: int, source: int | None = None) -> SimulatedAnswer:
        """Send a request, and return its answer."""
        self.send(one, engine, source)
        self.run()
        return self.answers[one.index]

    def assert_idle(self) -> None:
        """No page is held or lost."""
        for engine in self.engines:
            summary = engine.summary
            assert summary.pages_held == 0
            assert summary.pages_free + summary.pages_cached == engine.limits.num_pages
            assert not engine.core.has_requests

    def _post(self, number: int, time: float, client_id: bytes, message: ClientMessage, *, wakes: bool) -> None:
        self.engines[number].post(time, client_id, message, wakes=wakes)

    def _end(self, answer: SimulatedAnswer) -> None:
        self.answers[answer.request.index] = answer


def prompt(index: int, arrival: float, blocks: int = 20, **more: Any) -> SimulatedRequest:
    """Return a request whose prompt begins like all others of this function."""
    return request(index, arrival, blocks * BLOCK, 2, range(blocks), **more)


def ttft(answer: SimulatedAnswer) -> float:
    return answer.token_times[0] - answer.sent


@pytest.mark.parametrize("fetch", [QUICK, FetchTime(0.0, 0.01, 5e-5)])
def test_a_prefix_comes_in_the_time_of_the_way_and_its_tokens_count_as_cached(fetch: FetchTime) -> None:
    pair = Pair(fetch)
    pair.connect()
    first = pair.serve(prompt(0, 1.0), 0)
    second = pair.serve(prompt(1, 5.0), 1, source=0)
    tokens = 20 * BLOCK - PAGE  # the last token is computed in any case, with its page
    assert (first.cached_tokens, second.cached_tokens) == (0, tokens)
    rest = STEP_TIME.seconds(StepWork(PAGE, 0, 0, (20 * BLOCK) ** 2 - tokens**2))
    assert ttft(second) == pytest.approx(fetch.answer + tokens * fetch.token + rest)
    assert ttft(second) < 0.6 * ttft(first)
    assert [engine.summary.fetched_tokens for engine in pair.engines] == [0, tokens]
    pair.assert_idle()


def test_the_first_request_computes_its_prompt_since_the_peer_is_not_connected_yet() -> None:
    pair = Pair(FetchTime(connect=3.0, answer=4e-3, token=1e-6))
    pair.serve(prompt(0, 1.0), 0)
    found = [pair.serve(request(index, 5.0 + index, 640, 1, range(10 + index)), 1, source=0) for index in (1, 2, 3)]
    assert [each.cached_tokens for each in found] == [0, 640 - PAGE, 640 - PAGE]
    assert pair.engines[1].summary.fetched_tokens == 0
    fetched = pair.serve(prompt(4, 20.0), 1, source=0)
    assert fetched.cached_tokens == 20 * BLOCK - PAGE
    assert pair.engines[1].summary.fetched_tokens == 10 * BLOCK - PAGE


def test_nothing_is_fetched_that_the_router_does_not_say() -> None:
    pair = Pair()
    pair.connect()
    pair.serve(prompt(0, 1.0), 0)
    assert pair.serve(prompt(1, 5.0), 1).cached_tokens == 0


def test_a_fetch_that_takes_longer_than_computing_is_not_begun_again() -> None:
    """The first one shows how long it takes, which counts for a minute."""
    pair = Pair(FetchTime(0.0, 0.01, token=10 * STEP_TIME.prefill_token))
    pair.connect()
    for number in range(3):
        pair.serve(request(number, 1.0 + number, 10 * BLOCK, 1, range(100 * number, 100 * number + 10)), 0)
    found = [
        pair.serve(request(9 + number, at, 10 * BLOCK, 1, range(100 * number, 100 * number + 10)), 1, source=0)
        for number, at in enumerate([10.0, 20.0, 100.0])
    ]
    assert [each.cached_tokens for each in found] == [10 * BLOCK - PAGE, 0, 10 * BLOCK - PAGE]
    assert ttft(found[1]) < ttft(found[0]) / 5


def test_a_prefix_that_was_evicted_meanwhile_is_computed() -> None:
    pair = Pair(num_pages=60)
    pair.connect()
    first = pair.serve(prompt(0, 1.0), 0)
    pair.serve(request(1, 5.0, 58 * PAGE, 1, range(100, 129)), 0)
    second = pair.serve(prompt(2, 10.0), 1, source=0)
    assert second.cached_tokens <= 2 * PAGE
    assert ttft(second) > 0.9 * ttft(first)
    pair.assert_idle()


def test_what_is_evicted_while_it_is_sent_is_computed() -> None:
    """A request that needs the pages is not kept waiting by those that leave."""
    slow = FetchTime(0.0, 4e-3, token=5e-4)  # 16 ms a page: 0.6 s in all
    pair = Pair(slow, num_pages=60)
    pair.connect()
    pair.serve(prompt(0, 1.0), 0)
    pair.send(prompt(1, 5.0), 1, source=0)
    pair.send(request(2, 5.2, 50 * PAGE, 1, range(100, 125)), 0)
    pair.run()
    come = pair.engines[1].summary.fetched_tokens
    assert come == pytest.approx((0.2 - slow.answer / 2) / slow.token, abs=PAGE)
    assert come % PAGE == 0
    assert pair.answers[1].cached_tokens == come
    assert ttft(pair.answers[1]) < 0.5
    assert pair.answers[2].token_times[0] - 5.2 < 0.35
    pair.assert_idle()


def test_a_request_computes_what_does_not_come_in_time() -> None:
    """A page takes longer than all of them would take to compute, four times and at least a second."""
    pair = Pair(FetchTime(0.0, 4e-3, token=1.0))
    pair.connect()
    pair.serve(prompt(0, 1.0), 0)
    second = pair.serve(prompt(1, 5.0), 1, source=0)
    assert second.cached_tokens == 0
    assert 1.0 < ttft(second) < 3.0
    pair.assert_idle()


def test_requests_with_the_same_prefix_wait_for_one_fetch() -> None:
    pair = Pair(FetchTime(0.0, 4e-3, token=2e-5))
    pair.connect()
    pair.serve(prompt(0, 1.0), 0)
    pair.send(prompt(1, 5.0), 1, source=0)
    pair.send(prompt(2, 5.001), 1, source=0)
    pair.run()
    assert [pair.answers[index].cached_tokens for index in (1, 2)] == [20 * BLOCK - PAGE] * 2
    assert pair.engines[1].summary.fetched_tokens == 20 * BLOCK - PAGE


def test_an_engine_sends_one_prefix_after_the_other_and_computes_meanwhile() -> None:
    fetch = FetchTime(0.0, 4e-3, token=5e-5)
    pair = Pair(fetch)
    pair.connect()
    other = range(100, 120)
    pair.serve(prompt(0, 1.0), 0)
    pair.serve(request(1, 2.0, 20 * BLOCK, 2, other), 0)
    pair.send(request(2, 4.9, 64, 100, [500]), 0)
    pair.send(request(3, 4.9, 64, 100, [501]), 1)
    pair.send(prompt(4, 5.0), 1, source=0)
    pair.send(request(5, 5.0, 20 * BLOCK, 2, other), 1, source=0)
    pair.run()
    took = (20 * BLOCK - PAGE) * fetch.token
    assert [pair.answers[index].cached_tokens for index in (4, 5)] == [20 * BLOCK - PAGE] * 2
    starts = [pair.answers[index].token_times[0] - 5.0 for index in (4, 5)]
    assert starts[0] == pytest.approx(took, abs=0.05)
    assert starts[1] == pytest.approx(2 * took, abs=0.05)
    for index in (2, 3):
        gaps = [
            b - a for a, b in zip(pair.answers[index].token_times, pair.answers[index].token_times[1:], strict=False)
        ]
        assert max(gaps) < 0.05


def test_a_loaded_fleet_fetches_and_its_first_tokens_come_sooner() -> None:
    with_fetch, without = (FleetRun(setup(3, "prefix-affinity", fetch=fetch), crowd(60)) for fetch in (QUICK, None))
    fetched, cached = (
        [sum(getattr(engine, name) for engine in run.end.engines) for run in (with_fetch, without)]
        for name in ("fetched_tokens", "cached_tokens")
    )
    assert fetched[0] >= 3 * 20 * BLOCK
    assert fetched[1] == 0
    assert cached[0] > cached[1]
    means = [sum(times_of(each)[0] - each.sent for each in run.results) for run in (with_fetch, without)]
    assert means[0] < means[1]


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_only_a_router_that_knows_the_caches_has_prefixes_fetched(router: str) -> None:
    """As in a live set."""
    outcome = FleetRun(setup(3, router, fetch=QUICK), crowd(60))
    assert outcome.fleet.router.can_fetch == (router == "prefix-affinity")
    assert any(engine.fetched_tokens for engine in outcome.end.engines) == (router == "prefix-affinity")


def test_engines_without_a_prefix_cache_fetch_nothing() -> None:
    outcome = FleetRun(setup(2, "prefix-affinity", fetch=QUICK, enable_prefix_caching=False), crowd(20))
    assert [engine.fetched_tokens for engine in outcome.end.engines] == [0, 0]


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    rate=st.sampled_from([5.0, 20.0, 200.0]),
    engines=st.integers(2, 4),
    num_pages=st.sampled_from([80, 150, 2000]),
    max_num_seqs=st.sampled_from([3, 8]),
    fetch=st.builds(
        FetchTime,
        connect=st.sampled_from([0.0, 0.5]),
        answer=st.sampled_from([0.0, 0.002, 0.3]),
        token=st.sampled_from([0.0, 2e-5, 2e-3, 0.1]),
    ),
)
def test_whatever_is_fetched_steps_are_foreseen_and_no_page_is_lost(
    seed: int, rate: float, engines: int, num_pages: int, max_num_seqs: int, fetch: FetchTime
) -> None:
    requests = chats(30, seed, rate) if seed % 2 else crowd(30, rate)
    chosen = setup(engines, "prefix-affinity", num_pages=num_pages, max_num_seqs=max_num_seqs, fetch=fetch)
    foreseen, stepwise = FleetRun(chosen, requests), FleetRun(chosen, requests, is_stepwise=True)
    assert (foreseen.results, foreseen.samples) == (stepwise.results, stepwise.samples)
    assert foreseen.end == stepwise.end
    for result, each in zip(foreseen.results, requests, strict=True):
        assert result.error is None
        assert len(times_of(result)) == each.output_tokens
    assert [sample.time for sample in foreseen.samples] == sorted(sample.time for sample in foreseen.samples)
    for engine in foreseen.end.engines:
        assert engine.pages_held == 0
        assert engine.pages_free + engine.pages_cached == num_pages
