"""Snapshots of the engine."""

from __future__ import annotations

from paged_executor import Engine

from quire.engine_core.stats import take_prefix_tree, take_snapshot
from quire.protocol.messages import Abort, EngineSnapshot, HotPrefix, UtilityCall, UtilityResult

PROMPT = list(range(100, 122))  # 5 pages of 4, and 2 tokens


def snapshot(engine: Engine) -> EngineSnapshot:
    """Take a snapshot whose pages add up."""
    taken = take_snapshot(engine.core)
    free, held, shared, cached, pinned = taken.page_map.num_pages
    stats = taken.stats
    assert (free, cached, held + shared + pinned) == (stats.pages_free, stats.pages_cached, stats.pages_held)
    assert len(taken.page_map.cells) == stats.pages_total
    return taken


def test_an_engine_that_has_done_nothing() -> None:
    taken = snapshot(Engine())
    assert (taken.batch, taken.batch_size, taken.waiting, taken.prefixes) == ([], 0, [], [])
    assert taken.page_map.num_pages == [100, 0, 0, 0, 0]


def test_decoding_requests_and_requests_in_prefill() -> None:
    engine = Engine()
    engine.add("a", [1, 2, 3], max_tokens=5)
    engine.step()
    engine.add("b", list(range(60)), max_tokens=5)
    engine.add("c", list(range(200, 240)), max_tokens=5)
    computed = engine.step()
    first, *others = snapshot(engine).batch
    assert (first.number, first.in_prefill, first.count) == (1, False, 1)
    assert (first.num_computed_tokens, first.num_prompt_tokens, first.num_output_tokens) == (4, 3, 2)
    assert {entry.number: entry.count for entry in others} == {2: computed["b"][1], 3: computed["c"][1]}
    for entry in others:
        assert (entry.in_prefill, entry.num_computed_tokens, entry.num_output_tokens) == (True, entry.count, 0)
    engine.finish()


def test_beams_are_one_entry() -> None:
    engine = Engine()
    engine.add("a", [1, 2, 3], max_tokens=6, beam_width=3, n=1)
    engine.add("b", [4], max_tokens=6)
    engine.step()
    engine.step()
    entries = [(entry.number, entry.in_prefill, entry.count) for entry in snapshot(engine).batch]
    assert entries == [(2, False, 1), (1, False, 3)]
    engine.finish()


def test_waiting_requests() -> None:
    engine = Engine(max_num_seqs=1)
    for name in "abc":
        engine.add(name, PROMPT, max_tokens=30)
    engine.step()
    engine.now += 2.0
    taken = snapshot(engine)
    assert [(entry.number, entry.num_prompt_tokens, entry.seconds, entry.status) for entry in taken.waiting] == [
        (2, 22, 2.0, "waiting"),
        (3, 22, 2.0, "waiting"),
    ]
    assert (taken.stats.waiting, taken.waiting_tokens) == (2, 44)
    engine.finish()


def test_lists_are_cut_but_counts_are_not() -> None:
    engine = Engine(max_num_seqs=400, max_num_batched_tokens=1000, num_pages=2000)
    for number in range(300):
        engine.add(str(number), [number], max_tokens=3)
    engine.step()
    for number in range(300, 330):
        engine.add(str(number), [1], max_tokens=3)
    taken = snapshot(engine)
    assert (len(taken.batch), taken.batch_size) == (256, 300)
    assert (len(taken.waiting), taken.stats.waiting) == (16, 30)
    engine.finish()


def test_the_pages_of_a_prefix_that_several_have_and_of_one_that_is_pinned() -> None:
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=20)
    engine.add("b", PROMPT, max_tokens=20)
    engine.step()
    engine.step()
    assert snapshot(engine).page_map.num_pages == [93, 2, 5, 0, 0]
    engine.core.receive(b"client", UtilityCall(1, "pin_prefix", PROMPT[:8]))
    assert snapshot(engine).page_map.num_pages == [93, 2, 3, 0, 2]
    engine.core.receive(b"client", Abort(["a", "b"]))
    assert snapshot(engine).page_map.num_pages == [95, 0, 0, 3, 2]
    engine.finish()


def test_hot_prefixes_have_no_tokens_of_a_salt() -> None:
    engine = Engine()
    for salt in ("", "", "mine", "mine", "mine"):
        engine.add("a", PROMPT, max_tokens=1, cache_salt=salt)
        engine.finish()
    assert snapshot(engine).prefixes == [
        HotPrefix(2, 5, 0, True),
        HotPrefix(1, 5, 0, False, PROMPT[:4], PROMPT[16:20]),
    ]


def test_totals_count_all_steps() -> None:
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=4)
    engine.finish()
    taken = snapshot(engine)
    assert (taken.total_prefill_tokens, taken.total_decode_tokens) == (22, 3)


def test_the_prefix_cache_as_a_tree() -> None:
    engine = Engine()
    for last in (1, 2, 3):
        engine.add("a", [*PROMPT[:8], *[last] * 5], max_tokens=1)
        engine.finish()
    engine.core.receive(b"client", UtilityCall(1, "pin_prefix", PROMPT[:4]))
    tree = take_prefix_tree(engine.core, {})
    whole, common, *branches = tree.runs
    assert (tree.block_size, whole.id, whole.pages_below, whole.branches) == (4, -1, 5, 1)
    assert (common.num_pages, common.users, common.branches, common.pages_below) == ([0, 0, 0, 1, 1], 1, 3, 3)
    assert (common.first_token_ids, common.last_token_ids) == (PROMPT[:4], PROMPT[4:8])
    assert sorted(run.first_token_ids for run in branches) == [[1] * 4, [2] * 4, [3] * 4]
    assert {(run.parent, tuple(run.num_pages)) for run in branches} == {(1, (0, 0, 0, 1, 0))}
    assert take_prefix_tree(engine.core, {common.id: 0}).runs == [whole, common]


def test_a_prefix_tree_is_bounded() -> None:
    engine = Engine(num_pages=2000)
    for number in range(400):
        engine.add("a", [number] * 5, max_tokens=1)
        engine.finish()
    assert len(take_prefix_tree(engine.core, {}).runs) == 1 + 8
    tree = take_prefix_tree(engine.core, {-1: 200})
    assert (len(tree.runs), tree.runs[0].branches) == (201, 400)
    shown = {run.id: 200 for run in tree.runs[:100]}
    assert len(take_prefix_tree(engine.core, shown).runs) <= 256


def test_a_client_gets_a_prefix_tree_by_a_utility_call() -> None:
    engine = Engine()
    engine.core.receive(b"client", UtilityCall(7, "prefix_tree", shown={-1: 3}))
    [message] = engine.sent[b"client"]
    assert isinstance(message, UtilityResult)
    assert message.result == take_prefix_tree(engine.core, {-1: 3})


def test_a_client_gets_it_by_a_utility_call() -> None:
    engine = Engine()
    engine.core.receive(b"client", UtilityCall(7, "snapshot"))
    [message] = engine.sent[b"client"]
    assert isinstance(message, UtilityResult)
    assert (message.call_id, message.result) == (7, take_snapshot(engine.core))
