"""The engine that gets a request, by what the router knows: its requests, their answers, and reports of engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from prefix_reports import PrefixNumbers

from quire.protocol.messages import SchedulerStats
from quire.protocol.routing.routers import ROUTERS, PrefixAffinity, RoutedRequest, Router

BLOCK = 64
PAGE = 32


def router(name: str, num_engines: int = 4, seed: int = 0) -> Router:
    one = ROUTERS[name](seed)
    for engine in range(num_engines):
        one.add(engine, PAGE)
    return one


def affinity(num_engines: int = 4) -> PrefixAffinity:
    one = router("prefix-affinity", num_engines)
    assert isinstance(one, PrefixAffinity)
    return one


def prompt(blocks: Iterable[int]) -> list[int]:
    """Return tokens that are equal where the blocks are."""
    return [block for block in blocks for _ in range(BLOCK)]


def request(blocks: Iterable[int], **more: Any) -> RoutedRequest:
    tokens = prompt(blocks)
    return RoutedRequest(len(tokens), lambda: tokens, **more)


def fresh(index: int, blocks: int = 2) -> RoutedRequest:
    """One that shares nothing."""
    return request(range(100 * index, 100 * index + blocks))


def test_round_robin_ignores_the_load() -> None:
    one = router("round-robin")
    assert [one.send(fresh(index)) for index in range(6)] == [0, 1, 2, 3, 0, 1]


def test_the_least_loaded_engine_has_answered() -> None:
    one = router("least-loaded")
    requests = [fresh(index) for index in range(6)]
    assert [one.send(each) for each in requests[:4]] == [0, 1, 2, 3]
    one.ended(requests[2], 10)
    assert one.send(requests[4]) == 2
    assert one.send(requests[5]) == 3  # all alike: the next one


def test_a_request_for_several_answers_is_more_load() -> None:
    one = router("least-loaded", 2)
    assert one.send(request([1], num_answers=3)) == 0
    assert [one.send(fresh(index)) for index in range(1, 5)] == [1, 1, 1, 0]


def test_of_two_choices_the_less_loaded_is_taken() -> None:
    one, other = router("power-of-two", 16, seed=3), router("power-of-two", 16, seed=3)
    chosen = [one.send(fresh(index)) for index in range(160)]
    assert chosen == [other.send(fresh(index)) for index in range(160)]
    third = router("power-of-two", 16, seed=4)
    assert chosen != [third.send(fresh(index)) for index in range(160)]
    assert max(Counter(chosen).values()) <= 14  # 10 on average; sampling one alone gives about 18


def test_a_session_stays_and_a_new_one_goes_to_the_least_loaded() -> None:
    one = router("sticky")
    assert [one.send(request([index], session=name)) for index, name in enumerate("abacab")] == [0, 1, 0, 2, 0, 1]


def test_a_session_moves_only_when_its_engine_takes_no_requests() -> None:
    one = router("sticky")
    turns = [request([index], session="a") for index in range(4)]
    assert [one.send(each, engines) for each, engines in zip(turns, ([2, 3], None, [0, 1], None), strict=True)] == [
        2, 2, 0, 0,
    ]  # fmt: skip
    assert [each.reason for each in turns] == ["load", "session", "load", "session"]


def test_sessions_of_other_salts_are_others() -> None:
    one = router("sticky")
    assert one.send(request([1], session="a", salt="x")) == 0
    assert one.send(request([2], session="a", salt="y")) == 1


def test_without_sessions_the_first_1024_tokens_identify_the_session() -> None:
    """Fewer may be a system prompt that all share."""
    one, half = router("sticky"), 512 // BLOCK
    prompts = [[0] * half + [1] * half + [2], [0] * half + [3] * half, [0] * half + [1] * half + [5], [0], [0]]
    assert [one.send(request(blocks)) for blocks in prompts] == [0, 1, 0, 2, 3]


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_an_engine_alone_gets_all(name: str) -> None:
    one = router(name, 1)
    assert {one.send(fresh(index)) for index in range(3)} == {0}
    two = router(name)
    assert {two.send(fresh(index), [3]) for index in range(3)} == {3}


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_a_load_is_gone_with_its_requests(name: str) -> None:
    """Whether they end, or are taken back and sent again; calls that come twice have no effect."""
    one = router(name)
    requests = [request([index % 3, index], num_answers=1 + index % 2) for index in range(12)]
    for each in requests:
        one.send(each)
    for each in requests[::2]:
        one.first_token(each)
        one.first_token(each)
    lost = [each for each in requests if each.engine == 1]
    for each in lost:
        one.take_back(each)
        one.take_back(each)
    one.remove(1)
    one.add(1, PAGE)
    for each in lost:
        one.send(each)
    for each in requests:
        one.ended(each, 5)
        one.ended(each, 5)
    assert all((load.in_flight, load.prefills, load.prefill_tokens) == (0, 0, 0) for load in one.loads.values())
    if isinstance(one, PrefixAffinity):
        assert one.outline.match(one.outline.prefixes("", prompt([0, 0]))) == {}


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_what_an_engine_says_after_its_end_has_no_effect(name: str) -> None:
    one = router(name, 2)
    one.remove(0)
    one.observe(0, SchedulerStats(1, decode_tokens=3, execute_seconds=0.1))
    one.report(0, PrefixNumbers().stored(prompt([1]), PAGE))
    assert one.send(request([1])) == 1


def test_a_reported_prefix_attracts_requests() -> None:
    one, numbers = affinity(), PrefixNumbers()
    for engine, blocks in ((2, range(20)), (3, range(50, 70))):
        one.report(engine, numbers.stored(prompt(blocks), PAGE))
    first, second, other = request([*range(50, 70), 80, 81]), request([*range(20), 90, 91]), request(range(200, 220))
    assert (one.send(first), one.send(second)) == (3, 2)
    assert (first.reason, first.cached_tokens, first.waits_for) == ("prefix", 20 * BLOCK, 2 * BLOCK)
    assert one.send(other) in (0, 1)
    assert (other.reason, other.cached_tokens) == ("load", 0)


def test_an_engine_that_has_more_is_the_source_of_a_fetch() -> None:
    one, numbers = affinity(2), PrefixNumbers()
    one.report(0, numbers.stored(prompt(range(20)), PAGE))

    def source(blocks: Iterable[int], engines: list[int]) -> int | None:
        sent = request(blocks)
        assert one.send(sent, engines) == engines[0]
        one.take_back(sent)
        return sent.source

    assert source([*range(20), 70], [1]) is None  # engines cannot fetch
    one.can_fetch = True
    assert source([*range(20), 70], [1]) == 0  # which takes no requests
    assert source([*range(20), 70], [0, 1]) is None
    assert source([70, *range(20)], [1]) is None


def test_what_is_still_computed_is_no_source() -> None:
    one = affinity(2)
    one.can_fetch = True
    first, second = request(range(20)), request(range(20))
    one.send(first, [0])
    one.send(second, [1])
    assert second.source is None


def test_a_removed_prefix_attracts_none() -> None:
    one, numbers, tokens = affinity(), PrefixNumbers(), prompt(range(20))
    one.report(2, numbers.stored(tokens, PAGE))
    for end in range(len(tokens), 0, -PAGE):
        one.report(2, numbers.removed(tokens[:end]))
    assert one.send(request(range(20))) == 0


def test_a_prefix_counts_under_its_salt_alone() -> None:
    one, numbers = affinity(), PrefixNumbers()
    one.report(2, numbers.stored(prompt(range(20)), PAGE, salt="x"))
    other, same = request(range(20)), request(range(20), salt="x")
    assert (one.send(other), one.send(same)) == (0, 2)


def test_an_adapter_stays_on_an_engine_that_is_as_good_as_any() -> None:
    """It is in that one's memory, with what its requests have in common."""
    one = affinity()
    for index in range(3):
        sent = request([index], adapter="/tales", salt="/tales")
        assert one.send(sent) == 0
        one.ended(sent, 10)
    assert one.send(request([8], adapter="/songs", salt="/songs")) == 1
    busy = [one.send(request([index], adapter="/tales", salt="/tales")) for index in range(20, 28)]
    assert {*busy} == {0, 1, 2, 3}


def test_the_last_page_is_computed_of_a_prompt_that_is_cached_as_a_whole() -> None:
    one = affinity(2)
    one.report(1, PrefixNumbers().stored(prompt(range(4)), PAGE))
    whole = request(range(4))
    assert one.send(whole) == 1
    assert (whole.cached_tokens, whole.waits_for) == (4 * BLOCK - PAGE, PAGE)


def test_a_prompt_that_is_being_computed_attracts_requests_until_it_is_aborted() -> None:
    one = affinity()
    first, other = request(range(20)), request(range(50, 70))
    assert (one.send(first), one.send(other)) == (0, 1)
    same = request([*range(50, 70), 80])
    assert (one.send(same), same.cached_tokens) == (1, 20 * BLOCK)
    one.take_back(same)
    one.take_back(other)
    again = request([*range(50, 70), 81])
    one.send(again)
    assert (again.reason, again.cached_tokens) == ("load", 0)


def test_a_computed_prompt_counts_as_far_as_it_was_reported() -> None:
    """Without a report the engine has not kept it."""
    one, numbers = affinity(), PrefixNumbers()
    first, other = request(range(20)), request(range(50, 70))
    for each in (first, other):
        one.send(each)
    one.report(0, numbers.stored(prompt(range(20)), PAGE))
    for each in (first, other):
        one.first_token(each)
    after = [request([*range(20), 80]), request([*range(50, 70), 81])]
    assert one.send(after[0]) == 0
    one.send(after[1])
    assert [each.cached_tokens for each in after] == [20 * BLOCK, 0]


def test_a_hot_prefix_spreads_to_more_engines_as_its_queue_grows() -> None:
    one = affinity()
    chosen = [one.send(request([*range(10), 100 + index])) for index in range(80)]
    assert max(Counter(chosen).values()) < 40
    assert set(chosen) == {0, 1, 2, 3}


def test_prompts_without_a_first_token_count_as_work() -> None:
    one = affinity(2)
    long, short = fresh(0, 40), fresh(1, 1)
    assert (one.send(long), one.send(short), one.send(fresh(2, 1))) == (0, 1, 1)
    one.first_token(long)
    assert one.loads[0].prefill_tokens == 0
    assert one.send(fresh(3, 1)) == 0
    for each in (long, short):
        one.ended(each, 10)
    assert [load.in_flight for load in one.loads.values()] == [1, 1]


def observe(one: PrefixAffinity, engine: int, factor: float = 1.0) -> None:
    """Tell the router of steps whose costs are `factor` times those of a quick engine."""
    for step in range(1, 200):
        prefill, decode = 100 * (step % 7), step % 5
        seconds = factor * (1e-4 + 1e-6 * prefill + 1e-5 * decode)
        one.observe(engine, SchedulerStats(step, prefill_tokens=prefill, decode_tokens=decode, execute_seconds=seconds))


def test_idle_engines_take_turns_though_their_costs_differ_a_little() -> None:
    one = affinity(3)
    for engine in range(3):
        observe(one, engine, 1 + 0.02 * engine)
    chosen = []
    for index in range(6):
        each = fresh(index)
        chosen.append(one.send(each))
        one.ended(each, 5)
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_an_engine_is_not_preferred_for_being_the_first_that_was_measured() -> None:
    """Its steps are far quicker than assumed, and so will be those of the others."""
    one = affinity(2)
    observe(one, 0)
    assert one.costs[0].seconds.prefill < 1e-5
    assert Counter(one.send(fresh(index)) for index in range(10)) == {0: 5, 1: 5}


def test_a_slow_engine_gets_fewer_requests() -> None:
    one = affinity(2)
    observe(one, 0)
    observe(one, 1, 4.0)
    chosen = Counter(one.send(fresh(index)) for index in range(100))
    assert 3 < chosen[0] / chosen[1] < 5


def test_engines_with_pages_of_other_sizes_are_compared_in_tokens() -> None:
    one, numbers = ROUTERS["prefix-affinity"](), PrefixNumbers()
    one.add(5, 16)
    one.add(7, 64)
    tokens = prompt(range(10))
    one.report(5, numbers.stored(tokens[:80], 16))
    one.report(7, numbers.stored(tokens[: 2 * BLOCK], 64))
    each = request(range(10))
    assert (one.send(each), each.cached_tokens) == (7, 2 * BLOCK)
