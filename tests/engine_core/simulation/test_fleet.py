"""A fleet in virtual time: the real scheduler's decisions, the same for foreseen and for single steps."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulations import BLOCK, STEP_TIME, FleetRun, chats, request, setup, times_of

from quire.engine_core.simulation.engine import EngineTiming, SimulatedAnswer, SimulatedEngine, limits_of
from quire.engine_core.simulation.executor import prompt_tokens
from quire.engine_core.simulation.fleet import Fleet
from quire.protocol.messages import EngineCoreEvent, EngineCoreOutput, EngineCoreOutputs, ErrorKind, EventType
from quire.protocol.routing.routers import ROUTERS, PrefixAffinity
from quire.protocol.simulation import ClientTime, Rest, SimulatedRequest, StepTime, StepWork
from quire.protocol.speculative_config import SpeculativeConfig


def assert_served(outcome: FleetRun, requests: list[SimulatedRequest]) -> None:
    """Each has its answer, nothing is held, and no page is lost."""
    assert [result.index for result in outcome.results] == [each.index for each in requests]
    for result, each in zip(outcome.results, requests, strict=True):
        assert result.error is None
        times = times_of(result)
        assert len(times) == each.output_tokens
        assert times == sorted(times)
        assert result.sent >= each.arrival
        assert times[0] > result.sent
        assert result.ended == times[-1]
    for engine, summary in zip(outcome.fleet.engines, outcome.end.engines, strict=True):
        assert summary.pages_held == 0
        assert summary.pages_free + summary.pages_cached == engine.limits.num_pages
    assert sum(summary.requests for summary in outcome.end.engines) == len(requests)
    assert sum(summary.output_tokens for summary in outcome.end.engines) == sum(each.output_tokens for each in requests)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    rate=st.sampled_from([2.0, 20.0, 200.0]),
    router=st.sampled_from(sorted(ROUTERS)),
    engines=st.integers(1, 3),
    more=st.fixed_dictionaries(
        {
            "scheduling_policy": st.sampled_from(["fcfs", "lpm", "sjf"]),
            "num_pages": st.sampled_from([80, 150, 2000]),
            "max_num_seqs": st.sampled_from([3, 8]),
            "target_itl": st.sampled_from([0.0, 25.0, 100.0]),
            "enable_prefix_caching": st.booleans(),
            "tells_lengths": st.booleans(),
            "concurrency": st.sampled_from([None, 1, 4]),
            "client": st.sampled_from(
                [ClientTime(), ClientTime(0.003, 0.02, 0.001, 0.004, (Rest(0.1, 0.03), Rest(0.5, 0.06)))]
            ),
        }
    ),
    sessions=st.sampled_from([0, 5]),
)
def test_foreseen_steps_equal_single_steps(
    seed: int, rate: float, router: str, engines: int, more: dict[str, Any], sessions: int
) -> None:
    requests = chats(40, seed, rate, sessions)
    chosen = setup(engines, router, **more)
    foreseen, stepwise = FleetRun(chosen, requests), FleetRun(chosen, requests, is_stepwise=True)
    assert foreseen.results == stepwise.results
    assert foreseen.samples == stepwise.samples
    assert foreseen.end == stepwise.end
    times = [[event.timestamp for event in result.events] for result in foreseen.results]
    assert all(each == sorted(each) for each in times)
    if more["tells_lengths"] and more["client"] == ClientTime() and more["concurrency"] is None:
        assert_served(foreseen, requests)


@pytest.mark.parametrize("tells_lengths", [True, False])
def test_preemptions_are_foreseen_as_well(tells_lengths: bool) -> None:
    """Short answers teach the engine to expect short ones; then long ones come."""
    requests = [request(index, 0.01 * index, 40, 5 if index < 60 else 600, [index]) for index in range(75)]
    chosen = setup(num_pages=40, max_model_len=700, tells_lengths=tells_lengths)
    foreseen, stepwise = FleetRun(chosen, requests), FleetRun(chosen, requests, is_stepwise=True)
    assert foreseen.end.engines[0].preemptions > 0
    assert foreseen.end.engines[0].evictions > 0
    assert (foreseen.results, foreseen.samples, foreseen.end) == (stepwise.results, stepwise.samples, stepwise.end)


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_the_same_seed_gives_the_same_results(router: str) -> None:
    one, two = (FleetRun(setup(3, router, seed=7), chats(60, sessions=4)) for _ in range(2))
    assert (one.results, one.samples, one.end) == (two.results, two.samples, two.end)


def test_a_fleet_of_one_is_a_single_engine() -> None:
    requests = chats(50)
    answers: list[SimulatedAnswer] = []
    engine = SimulatedEngine(limits_of(setup().engine), EngineTiming(STEP_TIME), on_end=answers.append)
    for each in requests:
        engine.send(each, each.arrival, each.arrival)
    while engine.next_step < float("inf"):
        engine.step()
    answers.sort(key=lambda answer: answer.request.index)
    for router in sorted(ROUTERS):
        outcome = FleetRun(setup(1, router), requests)
        assert [result.token_times for result in outcome.results] == [a.token_times.tobytes() for a in answers]
        assert outcome.end.engines == [engine.summary]


def test_affinity_finds_prefixes_that_chance_scatters() -> None:
    """Five families of prompts that come in turn, on four engines."""
    requests = [
        request(
            index, 0.2 * index, 32 * BLOCK, 10, [*range(100 * (index % 5), 100 * (index % 5) + 30), 1000 + index, 0]
        )
        for index in range(60)
    ]
    hits = {}
    for name in ROUTERS:
        engines = FleetRun(setup(4, name, num_pages=300), requests).end.engines
        hits[name] = sum(engine.cached_tokens for engine in engines) / sum(engine.prompt_tokens for engine in engines)
    assert hits["prefix-affinity"] > 0.75
    assert hits["sticky"] > 0.75
    assert hits["round-robin"] < 0.5


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_routers_know_of_every_end(router: str) -> None:
    outcome = FleetRun(setup(3, router, max_waiting_requests=2, max_num_seqs=2), chats(60, rate=200.0))
    assert any(result.error for result in outcome.results)
    for load in outcome.fleet.router.loads.values():
        assert (load.in_flight, load.prefills, load.prefill_tokens) == (0, 0, 0)


@pytest.mark.parametrize("client", [ClientTime(), ClientTime(0.003, 0.3)])
def test_a_router_learns_what_engines_have_cached_and_how_long_steps_take(client: ClientTime) -> None:
    """Some pages have been evicted."""
    requests = chats(60)
    outcome = FleetRun(setup(3, "prefix-affinity", num_pages=100, client=client), requests)
    router = outcome.fleet.router
    assert isinstance(router, PrefixAffinity)
    has_all = []
    for each in requests:
        tokens = prompt_tokens(each.blocks, BLOCK, each.prompt_tokens)
        found = router.outline.match(router.outline.prefixes("", tokens))
        for number, engine in enumerate(outcome.fleet.engines):
            tree, pages = engine.executor.sequences.tree, list[int]()
            root = tree.enter("")
            pages = tree.match(root, tokens)
            tree.leave(root)
            assert found.get(number, 0) == len(pages) * 32
            has_all.append(len(pages) == len(tokens) // 32)
    assert 20 < sum(has_all) < 100
    for costs in router.costs.values():
        assert costs.seconds.prefill == pytest.approx(STEP_TIME.prefill_token, rel=0.25)
        assert costs.seconds.decode == pytest.approx(STEP_TIME.decode, rel=0.25)


def drafting(length: float) -> SpeculativeConfig:
    return SpeculativeConfig(method="ngram", num_speculative_tokens=4, synthetic_acceptance_length=length)


def test_a_request_with_drafts_gets_as_many_tokens_a_step_as_hold() -> None:
    config = drafting(3.0)
    acceptance = config.synthetic_acceptance or 0.0
    assert sum(acceptance**number for number in range(5)) == pytest.approx(3.0)
    one = request(0, 0.0, 64, 1000, range(2))
    plain, drafted = FleetRun(setup(), [one]), FleetRun(setup(speculative_config=config), [one])
    (engine,) = drafted.end.engines
    assert len(times_of(drafted.results[0])) == 1000
    assert 1000 / engine.steps == pytest.approx(3.0, rel=0.15)
    assert plain.end.engines[0].steps == 1000
    assert 2 < times_of(plain.results[0])[-1] / times_of(drafted.results[0])[-1] < 3.2


def test_drafts_that_never_hold_take_no_time() -> None:
    runs = [FleetRun(setup(speculative_config=config), chats(60)) for config in (None, drafting(1.0))]
    assert [len(times_of(result)) for result in runs[0].results] == [len(times_of(each)) for each in runs[1].results]
    assert runs[1].end.seconds < 1.02 * runs[0].end.seconds


def test_a_lone_request_takes_the_time_of_the_model() -> None:
    step = StepTime(0.01, 1e-4, 5e-4, 1e-6, 1e-8, 1e-9)
    times = times_of(FleetRun(setup(), [request(0, 1.0, 200, 3, range(4))]).results[0])
    prefill = STEP_TIME.seconds(StepWork(200, 0, 0, 200**2))
    assert times[0] == pytest.approx(1.0 + prefill)
    assert times[1] - times[0] == pytest.approx(STEP_TIME.seconds(StepWork(0, 1, 200, 0)))
    assert times[2] - times[1] == pytest.approx(STEP_TIME.seconds(StepWork(0, 1, 201, 0)))
    assert step.seconds(StepWork.of([0, 300, 5], [100, 1, 20])) == pytest.approx(
        0.01 + 1e-4 * 120 + 5e-4 + 1e-6 * 300 + 1e-8 * (100**2 + 25**2 - 5**2) + 1e-9 * 120**2
    )


def test_the_path_between_client_and_engine_delays_messages() -> None:
    near = FleetRun(setup(), [request(0, 1.0, 200, 3, range(4))]).results[0]
    far = FleetRun(setup(client=ClientTime(0.25, 0.125)), [request(0, 1.0, 200, 3, range(4))]).results[0]
    assert far.sent == near.sent == 1.0
    assert far.events[0].timestamp == 1.25
    assert times_of(far) == pytest.approx([time + 0.375 for time in times_of(near)])


def test_requests_sent_at_once_reach_a_waking_engine_one_by_one() -> None:
    """A step has the requests that arrive before it begins."""
    client = ClientTime(0.25, to_next=0.5, to_wake=1.0)
    outcome = FleetRun(setup(client=client, num_engines=1), [request(index, 1.0, 20, 2, [index]) for index in range(5)])
    begins = [result.events[1].timestamp for result in outcome.results]
    assert [result.sent for result in outcome.results] == [1.0] * 5
    assert begins == [2.25] * 3 + [3.75] * 2  # it has nothing to do again when the fourth comes


def test_a_request_that_arrives_during_the_last_step_need_not_wake_the_engine() -> None:
    client = ClientTime(to_wake=1.0)
    requests = [request(0, 0.0, 200, 1, range(4)), request(1, 1.005, 200, 1, range(4, 8))]
    first, second = FleetRun(setup(client=client), requests).results
    assert first.events[1].timestamp == 1.0
    assert second.events[1].timestamp == first.ended > 1.005


def test_an_engine_takes_longer_to_wake_after_a_longer_rest() -> None:
    client = ClientTime(to_wake=1.0, rests=(Rest(2.0, 0.5), Rest(6.0, 2.5)))
    longer = [(0.0, 0.0), (1.0, 0.0), (2.0, 0.5), (5.0, 2.0), (6.0, 2.5), (100.0, 2.5)]
    assert [(idle, client.wake_seconds(idle) - 1.0) for idle, _ in longer] == longer
    requests = [request(0, 4.0, 200, 1, range(4)), request(1, 20.0, 200, 1, range(4, 8))]
    first, second = FleetRun(setup(client=client), requests).results
    assert first.events[1].timestamp == 4.0 + 1.0 + 1.5
    assert second.events[1].timestamp == 20.0 + 1.0 + 2.5


def test_a_turn_waits_for_the_one_before_it_and_then_for_its_delay() -> None:
    turns = [
        request(0, 0.0, 100, 30, range(2), session="a"),
        request(1, 0.01, 100, 5, range(2), session="a", delay=2.0),
        request(2, 0.02, 100, 5, range(2), session="a"),
        request(3, 0.02, 100, 5, range(2), session="b"),
        request(4, 50.0, 100, 5, range(2), session="a", delay=2.0),
        request(5, 50.5, 100, 5, range(2), session="b", delay=60.0),
    ]
    results = FleetRun(setup(2), turns).results
    assert results[1].sent == results[0].ended + 2.0
    assert results[2].sent == results[1].ended
    assert results[3].sent == 0.02
    assert results[4].sent == 50.0
    assert results[5].sent == results[3].ended + 60.0


def test_in_a_closed_loop_each_user_sends_when_it_has_its_answer() -> None:
    results = FleetRun(setup(2, concurrency=3), chats(40)).results
    assert [result.sent for result in results[:3]] == [0.0] * 3
    ended = sorted(result.ended for result in results)
    assert [result.sent for result in results[3:]] == ended[: len(results) - 3]


def test_a_full_queue_rejects_requests_and_too_long_ones_fail() -> None:
    requests = [request(index, 0.0, 640, 50, range(20 * index, 20 * index + 10)) for index in range(12)]
    requests.append(request(12, 30.0, 6400, 5, range(1000, 1100)))
    results = FleetRun(setup(max_waiting_requests=3, max_num_seqs=2), requests).results
    kinds = [result.error_kind for result in results]
    assert kinds.count(ErrorKind.OVERLOADED) == 9
    assert kinds[-1] is ErrorKind.INVALID
    assert "maximum context length is 4096" in str(results[-1].error)
    rejected = next(result for result in results if result.error_kind is ErrorKind.OVERLOADED)
    assert not rejected.token_times
    assert "3 requests" in str(rejected.error)


def test_equal_prefixes_are_found_in_the_cache() -> None:
    requests = [request(index, 10.0 * index, 10 * BLOCK, 3, range(10)) for index in range(3)]
    results = FleetRun(setup(), requests).results
    assert [result.cached_tokens for result in results] == [0, 10 * BLOCK - 32, 10 * BLOCK - 32]
    assert [event.type for event in results[0].events] == [
        EventType.QUEUED,
        EventType.SCHEDULED,
        EventType.FIRST_TOKEN,
        EventType.FINISHED,
    ]


def test_samples_come_in_time_and_add_up() -> None:
    outcome = FleetRun(setup(2, sample_seconds=0.5), chats(40))
    *between, last = outcome.samples
    assert [sample.time for sample in between] == [0.5 * number for number in range(1, len(between) + 1)]
    assert (last.running, last.waiting, last.pages_held) == (0, 0, 0)
    assert last.time == outcome.end.seconds
    assert last.output_tokens == sum(engine.output_tokens for engine in outcome.end.engines)
    assert any(sample.running for sample in between)


@pytest.mark.parametrize("client", [ClientTime(), ClientTime(0.003, 1.4)])
def test_samples_are_left_out_while_no_engine_has_work(client: ClientTime) -> None:
    day = 86400.0
    requests = [request(index, index * day + 0.25, 100, 30, range(2)) for index in range(3)]
    chosen = setup(2, sample_seconds=0.1, client=client)
    outcome, stepwise = FleetRun(chosen, requests), FleetRun(chosen, requests, is_stepwise=True)
    assert outcome.samples == stepwise.samples
    assert outcome.end.seconds > 2 * day
    assert len(outcome.samples) < 100
    assert sum(sample.running for sample in outcome.samples) > 5
    gaps = [pair for pair in itertools.pairwise(outcome.samples) if pair[1].time - pair[0].time > 0.15]
    for before, after in gaps:
        assert before.running == after.running == before.waiting == after.waiting == 0
        assert before.output_tokens == after.output_tokens
    ends = [after.time for before, after in gaps if after.time - before.time > 1000]
    assert ends == pytest.approx([day + 0.2, 2 * day + 0.2])


def test_requests_out_of_order_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"request 1 comes at 1.0 s, after one that comes at 2.0 s"):
        FleetRun(setup(), [request(0, 2.0, 10, 1, [0]), request(1, 1.0, 10, 1, [0])])


def test_each_token_of_an_output_counts() -> None:
    """An output has more than one token after drafts or forced tokens."""
    firsts: list[SimulatedAnswer] = []
    engine = SimulatedEngine(limits_of(setup().engine), EngineTiming(STEP_TIME), on_first_token=firsts.append)
    engine.send(request(0, 0.0, 100, 5, range(2)), 0.0, 0.0)
    event = EngineCoreEvent(EventType.FIRST_TOKEN, 1.0)
    engine._take(b"", EngineCoreOutputs([EngineCoreOutput("0", [7, 8, 9], events=[event])], None, 2.0))
    engine._take(b"", EngineCoreOutputs([EngineCoreOutput("0", [7, 8], events=[event])], None, 3.0))
    assert engine.num_output_tokens == 5
    assert [list(answer.token_times) for answer in firsts] == [[2.0, 2.0, 2.0, 3.0, 3.0]]


def test_steps_that_take_no_time_are_an_error() -> None:
    timeless = SimulatedEngine(limits_of(setup().engine), EngineTiming(StepTime(0.0, 0.0, 0.0)))
    timeless.send(request(0, 0.0, 100, 5, range(2)), 0.0, 0.0)
    with pytest.raises(RuntimeError, match="took no time"):
        timeless.step()


def test_memory_does_not_grow_with_the_stream() -> None:
    """Requests, their prompts and their answers are gone when they have ended."""
    peaks = []

    def stream(count: int) -> Iterator[SimulatedRequest]:
        for index in range(count):
            yield request(index, 0.05 * index, 320, 4, range(5 * index, 5 * index + 5), session=f"s{index % 50}")
            if index == count // 4:
                tracemalloc.reset_peak()
                peaks.append(tracemalloc.get_traced_memory()[0])

    counted = itertools.count()

    def count(_: object) -> None:
        next(counted)

    fleet = Fleet(setup(2, "prefix-affinity", num_pages=200, sample_seconds=100.0), count)
    tracemalloc.start()
    try:
        fleet.run(stream(2000))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert next(counted) > 2000
    assert peak - peaks[0] < 200_000
