"""Tenants take turns when grammars are compiled, and so do groups of them."""

from __future__ import annotations

from quire.engine_core.grammar.compile_turns import CompileTurns
from quire.engine_core.grammar.grammar import Grammar, grammar_key
from quire.protocol.messages import StructuredOutputs

THREADS = 4


def grammar(regex: str) -> Grammar:
    structured = StructuredOutputs(regex=regex)
    return Grammar(grammar_key(structured), structured)


def test_a_tenant_has_one_compilation_at_a_time_and_the_others_their_turns() -> None:
    turns = CompileTurns(THREADS)
    many, few = [grammar(f"a{index}") for index in range(5)], [grammar(f"b{index}") for index in range(2)]
    for each in many:
        turns.add("many", each)
    assert turns.take() is many[0]
    assert turns.take() is None
    for each in few:
        turns.add("few", each)
    assert turns.take() is few[0]
    assert turns.take() is None
    turns.end(many[0])
    assert turns.take() is many[1]
    turns.end(many[1])
    turns.end(few[0])
    assert [turns.take(), turns.take()] in ([few[1], many[2]], [many[2], few[1]])


def test_a_grammar_for_which_two_tenants_wait_is_compiled_at_the_first_turn_of_either() -> None:
    turns = CompileTurns(THREADS)
    first, shared, last = grammar("a"), grammar("b"), grammar("c")
    for each in (first, shared, last):
        turns.add("one", each)
    assert turns.take() is first
    turns.add("two", shared)
    assert turns.take() is shared
    turns.add("one", shared)  # it is being compiled
    assert not turns.remove(shared)
    turns.end(first)
    assert turns.take() is last
    assert turns.take() is None


def test_connections_of_an_address_leave_a_thread_to_another_address() -> None:
    turns = CompileTurns(THREADS)
    many, single = [grammar(f"a{index}") for index in range(40)], grammar("b")
    for index, each in enumerate(many):
        turns.add(f"server-127.0.0.1/{index}", each)
    assert [turns.take() for _ in range(THREADS)] == [*many[: THREADS - 1], None]
    turns.add("server-127.0.0.2/40", single)
    assert turns.take() is single
    turns.end(many[0])
    assert turns.take() is many[THREADS - 1]


def test_a_new_group_waits_for_the_next_end_only() -> None:
    """Two groups have all threads; the one that comes then is next, and each tenant of a group has its turn."""
    turns = CompileTurns(THREADS)
    of_group = {group: [grammar(f"{group}{index}") for index in range(9)] for group in ("first", "second", "third")}
    for group in ("first", "second"):
        for index, each in enumerate(of_group[group]):
            turns.add(f"{group}/{index % 3}", each)
    running = [turns.take() for _ in range(THREADS)]
    assert running == [
        *of_group["first"][:1],
        *of_group["second"][:1],
        *of_group["first"][1:2],
        *of_group["second"][1:2],
    ]
    turns.add("third/0", of_group["third"][0])
    assert running[1] is not None
    turns.end(running[1])
    assert turns.take() is of_group["third"][0]
    turns.end(of_group["third"][0])
    assert turns.take() is of_group["second"][2]


def test_a_group_of_one_thread_is_served_too() -> None:
    turns = CompileTurns(1)
    turns.add("a/1", each := grammar("a"))
    assert turns.take() is each


def test_nothing_waits_any_longer_at_the_end() -> None:
    turns = CompileTurns(THREADS)
    running, waiting = grammar("a"), grammar("b")
    turns.add("one", running)
    turns.add("two", waiting)
    turns.take()
    assert turns.remove(waiting)
    turns.add("two", waiting)
    assert turns.clear() == [running]
    assert turns.take() is None
