"""Prefixes come from a tier while other requests run, and nothing is lost if they don't."""

from __future__ import annotations

from typing import Any

import pytest
from filled_tier import FilledTier
from paged_executor import Engine, expected_tokens

from quire.engine_core.request import RequestStatus
from quire.protocol.messages import Abort, EventType, FinishReason

PROMPT = list(range(100, 122))  # 5 pages of 4, and 2 tokens
WAITS = RequestStatus.WAITING_FOR_REMOTE_KVS


def make_engine(**limits: Any) -> tuple[Engine, FilledTier]:
    engine = Engine(make_tier=FilledTier, **limits)
    (tier,) = engine.core.tiers
    assert isinstance(tier, FilledTier)
    return engine, tier


def answer(prompt: list[int], count: int) -> list[int]:
    return expected_tokens(prompt, 0, 1000, count)


def status(engine: Engine, request_id: str) -> RequestStatus:
    request = engine.core._requests.find(b"client", request_id)
    assert request is not None
    return request.status


def test_a_request_waits_for_its_prefix_while_another_one_runs() -> None:
    engine, tier = make_engine()
    tier.put(PROMPT)
    engine.add("a", [1, 2, 3], max_tokens=20)
    engine.step()
    engine.add("b", PROMPT, max_tokens=3)
    assert engine.step() == {"a": (3, 1)}
    assert status(engine, "b") is WAITS
    assert engine.step() == {"a": (4, 1)}
    assert engine.core.stats.waiting == 1
    tier.complete()
    assert engine.num_wakes == 1
    assert engine.step() == {"a": (5, 1), "b": (20, 2)}
    engine.finish()
    assert (engine.tokens("a"), engine.tokens("b")) == (answer([1, 2, 3], 20), answer(PROMPT, 3))
    assert engine.end("b").finish_reason is FinishReason.LENGTH
    events = [event.type for output in engine.outputs("b") for event in output.events or ()]
    assert events == [EventType.QUEUED, EventType.SCHEDULED, EventType.FIRST_TOKEN, EventType.FINISHED]
    assert next(output.num_cached_tokens for output in engine.outputs("b") if output.new_token_ids) == 20


def test_nothing_is_fetched_that_is_in_memory() -> None:
    engine, tier = make_engine()
    tier.put(PROMPT)
    engine.add("a", PROMPT[:10], max_tokens=1)
    engine.step()
    tier.complete()
    engine.finish()
    engine.add("b", PROMPT, max_tokens=1)
    engine.step()
    (fetch,) = tier.fetches
    assert len(fetch.keys) == 3
    tier.complete()
    engine.finish()
    assert engine.tokens("b") == answer(PROMPT, 1)


@pytest.mark.parametrize("num_pages", [0, 1, 4])
def test_what_does_not_come_is_computed(num_pages: int) -> None:
    engine, tier = make_engine()
    tier.put(PROMPT)
    engine.add("a", PROMPT, max_tokens=3)
    engine.step()
    tier.pages = dict(list(tier.pages.items())[:num_pages])
    tier.complete(num_pages)
    assert engine.step() == {"a": (4 * num_pages, 22 - 4 * num_pages)}
    engine.finish()
    assert engine.tokens("a") == answer(PROMPT, 3)


def test_those_that_need_the_same_pages_wait_for_one_fetch() -> None:
    engine, tier = make_engine()
    tier.put(PROMPT)
    for name in "ab":
        engine.add(name, PROMPT, max_tokens=2)
    engine.add("c", [*PROMPT[:8], 1, 2, 3, 4, 5], max_tokens=2)
    engine.step()
    assert len(tier.fetches) == 1
    assert [status(engine, name) for name in "abc"] == [WAITS] * 3
    tier.complete()
    engine.finish()
    assert [engine.tokens(name) for name in "ab"] == [answer(PROMPT, 2)] * 2
    assert engine.tokens("c") == answer([*PROMPT[:8], 1, 2, 3, 4, 5], 2)


def test_other_salts_have_other_pages() -> None:
    engine, tier = make_engine()
    tier.put(PROMPT, "tenant")
    engine.add("a", PROMPT, max_tokens=1)
    engine.finish()
    assert engine.executor.steps == [{"a": (0, 22)}]
    engine.add("b", PROMPT, max_tokens=1, cache_salt="tenant")
    engine.step()
    assert status(engine, "b") is WAITS
    tier.complete()
    engine.finish()
    assert engine.executor.steps[-1] == {"b": (20, 2)}


def test_a_request_that_ends_meanwhile_leaves_its_pages_to_the_cache() -> None:
    engine, tier = make_engine()
    tier.put(PROMPT)
    engine.add("a", PROMPT, max_tokens=1)
    engine.step()
    engine.core.receive(b"client", Abort(["a"]))
    assert engine.end_now("a").finish_reason is FinishReason.ABORT
    engine.check_accounts()
    assert engine.executor.sequences.held_pages == 5
    tier.complete()
    engine.step()
    assert (engine.executor.sequences.held_pages, engine.executor.sequences.cached_pages) == (0, 5)


def test_patience_ends_and_late_pages_do_no_harm() -> None:
    engine, tier = make_engine()
    tier.put(PROMPT)
    engine.add("a", PROMPT, max_tokens=3)
    engine.step()
    engine.now = 31.0
    assert engine.step() == {"a": (0, 22)}
    tier.complete()
    engine.finish()
    assert engine.tokens("a") == answer(PROMPT, 3)
    engine.add("b", PROMPT, max_tokens=1)
    engine.finish()
    assert engine.executor.steps[-1] == {"b": (20, 2)}


def test_pages_are_used_as_they_come_and_each_renews_patience() -> None:
    engine, tier = make_engine()
    tier.put(PROMPT)
    engine.add("a", PROMPT, max_tokens=3)
    engine.step()
    for now in (20.0, 40.0, 60.0):
        engine.now = now
        tier.fill(1)
        engine.step()
        assert status(engine, "a") is WAITS
    assert not tier.cancelled
    engine.now = 91.0
    assert engine.step() == {"a": (12, 10)}
    assert tier.cancelled == tier.fetches
    tier.complete(0)
    engine.finish()
    assert engine.tokens("a") == answer(PROMPT, 3)


def test_a_prompt_that_another_engine_computes_waits_for_its_turn() -> None:
    engine, tier = make_engine(num_pages=100)
    prompts = [[100 + i, *range(21)] for i in range(12)]
    for i, prompt in enumerate(prompts):
        tier.put(prompt)
        engine.add(str(i), prompt, max_tokens=3, remote_prefill=True)
    assert engine.step() == {}
    while len(tier.fetches) > 1:
        tier.complete()
        engine.step()
    assert [status(engine, "11"), len(tier.fetches)] == [WAITS, 1]
    tier.fill(2)
    tier.pages.clear()  # the other engine is gone: what is missing is computed
    tier.complete(0)
    engine.finish()
    assert [engine.tokens(str(i)) for i in range(12)] == [answer(prompt, 3) for prompt in prompts]
    assert max(count for step in engine.executor.steps for _, count in step.values()) == 14


def test_a_deadline_tells_what_was_waited_for() -> None:
    engine, tier = make_engine()
    tier.put(PROMPT)
    engine.add("a", PROMPT, max_tokens=3, timeout=2.0)
    engine.step()
    engine.now = 3.0
    engine.step()
    end = engine.end("a")
    assert end.finish_reason is FinishReason.TIMEOUT
    assert "while its KV pages were being fetched" in (end.error or "")
    tier.complete()
    engine.step()
    engine.finish()


def test_pages_that_come_more_slowly_than_they_are_computed_stay_there() -> None:
    engine, tier = make_engine()
    engine.core.scheduler.prefill_budget.learn(100.0, 0, 1.0)  # 10 ms a token
    tier.put(PROMPT)
    tier.slowness = 0.05  # a page, whose 4 tokens take 40 ms
    engine.add("a", PROMPT, max_tokens=1)
    engine.finish()
    assert engine.executor.steps == [{"a": (0, 22)}]
    tier.slowness = 0.03
    engine.core.scheduler.pins.unpin_all()
    engine.executor.sequences.tree.evict(5)
    engine.add("b", PROMPT, max_tokens=1)
    engine.step()
    assert status(engine, "b") is WAITS
    tier.complete()
    engine.finish()


def test_a_preempted_request_fetches_what_was_evicted() -> None:
    engine, tier = make_engine(num_pages=12)
    engine.expect_no_output()
    first, second = PROMPT[:14], list(range(200, 214))
    engine.add("a", first, max_tokens=24)
    engine.add("b", second, max_tokens=24)
    while not engine.core.scheduler.counters.preemptions:
        engine.step()
        tier.put([*second, *engine.tokens("b")][:20])
        tier.put([*first, *engine.tokens("a")][:20])
    for _ in range(100):
        engine.step()
        while tier.fetches:
            tier.complete()
        if not engine.core.has_requests:
            break
    engine.finish()
    assert (engine.tokens("a"), engine.tokens("b")) == (answer(first, 24), answer(second, 24))
    assert engine.core.scheduler.fetches.num_tokens > 0


def test_a_request_that_must_compute_every_token_fetches_nothing() -> None:
    engine, tier = make_engine()
    tier.put(PROMPT)
    engine.add("a", PROMPT, max_tokens=1, prompt_logprobs=0)
    engine.embed("b", PROMPT, pooling_type="mean")
    engine.finish()
    assert not tier.fetches
    assert sum(count for step in engine.executor.steps for _, count in step.values()) == 44


def test_a_fetch_takes_no_page_that_a_running_request_will_need() -> None:
    engine, tier = make_engine(num_pages=12)
    tier.put(PROMPT)
    engine.add("a", list(range(30)), max_tokens=12)
    engine.step()
    engine.add("b", PROMPT, max_tokens=2)
    for _ in range(5):
        engine.step()
        assert not tier.fetches
    while engine.core.has_requests:
        engine.step()
        while tier.fetches:
            tier.complete()
    assert engine.core.scheduler.counters.preemptions == 0
    assert engine.tokens("b") == answer(PROMPT, 2)


def test_every_request_of_a_full_queue_gets_its_pages_in_turn() -> None:
    engine, tier = make_engine(num_pages=20)
    prompts = [[100 + i, *range(21)] for i in range(12)]
    for i, prompt in enumerate(prompts):
        tier.put(prompt)
        engine.add(str(i), prompt, max_tokens=3)
    for _ in range(300):
        engine.step()
        if tier.fetches:
            tier.complete()
    engine.finish()
    assert [engine.tokens(str(i)) for i in range(12)] == [answer(prompt, 3) for prompt in prompts]
    assert engine.core.scheduler.fetches.num_tokens == 12 * 20
    assert [step[str(i)][0] for i in range(12) for step in engine.executor.steps if str(i) in step][::3] == [20] * 12


def test_a_tier_that_hangs_holds_up_nobody_for_ever() -> None:
    engine, tier = make_engine(num_pages=12)
    tier.put(PROMPT[:15])
    long = PROMPT + list(range(8))
    tier.put(long)
    engine.add("a", long, max_tokens=9)
    engine.add("b", [1, 2, 3], max_tokens=2)
    engine.step()
    assert status(engine, "a") is WAITS
    for _ in range(40):
        engine.now += 31.0
        engine.step()
        for fetch in tier.cancelled:
            if fetch in tier.fetches:
                tier.complete(0)
    engine.finish()
    assert engine.tokens("a") == answer(long, 9)
    assert engine.tokens("b") == answer([1, 2, 3], 2)


def test_one_who_needs_little_does_not_wait_for_a_long_fetch() -> None:
    engine, tier = make_engine(num_pages=100)
    engine.core.scheduler.prefill_budget.learn(100.0, 0, 1.0)  # 10 ms a token
    tier.slowness = 0.01
    long = list(range(100, 222))
    tier.put(long)
    tier.in_flight = 30
    engine.add("long", long, max_tokens=1)
    engine.step()
    assert status(engine, "long") is WAITS
    engine.add("short", long[:7], max_tokens=1)
    assert engine.step() == {"short": (0, 7)}
    tier.complete()
    engine.finish()
    assert engine.tokens("long") == answer(long, 1)


def test_samples_and_beams_of_a_prompt_share_a_fetch() -> None:
    alone = Engine()
    engine, tier = make_engine()
    tier.put(PROMPT)
    for each in (alone, engine):
        each.add("beams", PROMPT, max_tokens=3, beam_width=3, n=3)
        each.add("a", PROMPT, max_tokens=3)
        each.add("b", PROMPT, max_tokens=3, seed=1, shares_prompt_with="a")
    alone.finish()
    engine.step()
    assert len(tier.fetches) == 1
    tier.complete()
    engine.finish()
    assert [engine.tokens(name) for name in "ab"] == [alone.tokens(name) for name in "ab"]
    assert engine.end("beams").beams == alone.end("beams").beams
    assert not any(start < 20 for step in engine.executor.steps for start, _ in step.values())


def test_uses_are_told() -> None:
    engine, tier = make_engine()
    for name in "ab":
        engine.add(name, PROMPT, max_tokens=1)
        engine.finish()
    assert [len(keys) for keys in tier.touched] == [5, 5]
