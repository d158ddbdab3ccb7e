"""The engine that gets a request, by the requests that a router has sent and their answers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulations import BLOCK, FleetRun, chats, request, setup

from quire.engine_core.simulation.routers import ROUTERS, PrefixIndex, Router, prefix_keys
from quire.protocol.simulation import SimulatedRequest


def router(name: str, num_engines: int = 4, seed: int = 0, **changes: Any) -> Router:
    return ROUTERS[name](setup(num_engines, name, seed=seed, **changes))


def fresh(index: int, blocks: int = 2) -> SimulatedRequest:
    """One that shares nothing."""
    return request(index, 0.0, blocks * BLOCK, 10, range(100 * index, 100 * index + blocks))


def test_prefixes_of_other_blocks_have_other_keys() -> None:
    blocks = [-(2**63), -2, -1, 0, 1, 2, 2**63 - 1]
    keys = {key for first in blocks for key in prefix_keys([first, 5], BLOCK, 2 * BLOCK)}
    assert len(keys) == 2 * len(blocks)
    assert prefix_keys([1, 2], BLOCK, 2 * BLOCK)[0] == prefix_keys([1, 3], BLOCK, 2 * BLOCK)[0]


def test_round_robin_ignores_the_load() -> None:
    one = router("round-robin")
    assert [one.send(fresh(index)) for index in range(6)] == [0, 1, 2, 3, 0, 1]


def test_the_least_loaded_engine_has_answered() -> None:
    one = router("least-loaded")
    requests = [fresh(index) for index in range(6)]
    assert [one.send(each) for each in requests[:4]] == [0, 1, 2, 3]
    one.ended(requests[2], 2, 10)
    assert one.send(requests[4]) == 2
    assert one.send(requests[5]) == 3  # all alike: the next one


def test_of_two_choices_the_less_loaded_is_taken() -> None:
    one, other = router("power-of-two", 16, seed=3), router("power-of-two", 16, seed=3)
    chosen = [one.send(fresh(index)) for index in range(160)]
    assert chosen == [other.send(fresh(index)) for index in range(160)]
    assert chosen != [router("power-of-two", 16, seed=4).send(fresh(index)) for index in range(160)]
    assert max(Counter(chosen).values()) <= 14  # 10 on average; sampling one alone gives about 18
    assert router("power-of-two", 1).send(fresh(0)) == 0


def test_a_session_stays_and_a_new_one_goes_to_the_least_loaded() -> None:
    one = router("sticky")
    turns = [request(index, 0.0, BLOCK, 5, [index], session=name) for index, name in enumerate("abacab")]
    assert [one.send(each) for each in turns] == [0, 1, 0, 2, 0, 1]


def test_without_sessions_two_blocks_identify_the_session() -> None:
    """One block may be a system prompt that all share."""
    one = router("sticky")
    prompts = [(0, 1, 2), (0, 3), (0, 1, 5, 6), (0,), (0,)]
    assert [one.send(request(i, 0.0, len(blocks) * BLOCK, 5, blocks)) for i, blocks in enumerate(prompts)] == [
        0, 1, 0, 2, 3,
    ]  # fmt: skip


def test_equal_prefixes_go_together() -> None:
    one = router("prefix-affinity")
    first, other = request(0, 0.0, 20 * BLOCK, 5, range(20)), request(1, 0.0, 20 * BLOCK, 5, range(50, 70))
    assert (one.send(first), one.send(other)) == (0, 1)
    one.ended(first, 0, 5)
    one.ended(other, 1, 5)
    assert one.send(request(2, 0.0, 22 * BLOCK, 5, [*range(50, 70), 80, 81])) == 1
    assert one.send(request(3, 0.0, 22 * BLOCK, 5, [*range(20), 90, 91])) == 0


def test_a_prefix_is_not_worth_a_queue() -> None:
    one = router("prefix-affinity", 2)
    shared = list(range(20))
    assert one.send(request(0, 0.0, 20 * BLOCK, 5, shared)) == 0
    chosen = [one.send(request(1 + i, 0.0, 21 * BLOCK, 5, [*shared, 100 + i])) for i in range(40)]
    assert chosen[0] == 0 or chosen[1] == 0
    assert 1 in chosen  # which has computed nothing of it yet
    assert abs(chosen.count(0) - chosen.count(1)) < 10


def test_prompts_without_a_first_token_count_as_work() -> None:
    one = router("prefix-affinity", 2)
    long, short = fresh(0, 40), fresh(1, 1)
    assert (one.send(long), one.send(short), one.send(fresh(2, 1))) == (0, 1, 1)
    one.first_token(long, 0)
    assert one.loads[0].prefill_tokens == 0
    assert one.send(fresh(3, 1)) == 0
    for each, engine in ((long, 0), (short, 1)):
        one.ended(each, engine, 10)
    assert [load.in_flight for load in one.loads] == [1, 1]


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


def test_routers_know_of_every_end() -> None:
    for name in ROUTERS:
        outcome = FleetRun(setup(3, name, max_waiting_requests=2, max_num_seqs=2), chats(60, rate=200.0))
        assert any(result.error for result in outcome.results)
        assert all(load.in_flight == 0 == load.prefill_tokens for load in outcome.fleet.router.loads)
        assert not any(load.prefills for load in outcome.fleet.router.loads)


def test_keys_name_prefixes_of_whole_blocks() -> None:
    keys = prefix_keys([1, 2, 3], 64, 190)
    assert len(keys) == 2
    assert prefix_keys([1, 2, 9], 64, 192)[:2] == keys
    assert prefix_keys([2, 1], 64, 128)[1] not in keys


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=30), st.integers(1, 12))
def test_the_index_is_bounded_and_forgets_the_least_recent_first(prompts: list[list[int]], bound: int) -> None:
    """Against a list in order of use: of a prompt, the longest prefix counts as used first."""
    index, model = PrefixIndex(bound), list[int]()
    for blocks in prompts:
        keys = prefix_keys(blocks, 1, len(blocks))
        found = next((count for count, key in enumerate(keys) if key not in model), len(keys))
        assert index.match(keys) == found
        index.add(keys)
        model = [key for key in model if key not in keys] + keys[::-1]
        model = model[-bound:]
        assert len(index) == len(model)


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_a_router_of_one_engine_chooses_it(name: str) -> None:
    assert {router(name, 1).send(fresh(index)) for index in range(3)} == {0}
