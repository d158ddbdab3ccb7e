"""Tenants take turns when grammars are compiled."""

from __future__ import annotations

from quire.engine_core.grammar.compile_turns import MAX_LONG, CompileTurns
from quire.engine_core.grammar.grammar import Grammar, grammar_key
from quire.protocol.messages import StructuredOutputs


def grammar(regex: str) -> Grammar:
    structured = StructuredOutputs(regex=regex)
    return Grammar(grammar_key(structured), structured)


def test_a_tenant_has_one_compilation_at_a_time_and_the_others_their_turns() -> None:
    turns = CompileTurns()
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
    turns = CompileTurns()
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


def test_long_grammars_leave_a_thread_to_short_ones() -> None:
    turns = CompileTurns()
    long = [grammar(f"{index}{'a' * 10_000}") for index in range(MAX_LONG + 2)]
    short = grammar("a")
    for index, each in enumerate(long):
        turns.add(f"connection {index}", each)
    assert [turns.take() for _ in range(MAX_LONG + 1)] == [*long[:MAX_LONG], None]
    turns.add("other", short)
    assert turns.take() is short
    turns.end(long[0])
    assert turns.take() is long[MAX_LONG]
    assert turns.take() is None


def test_nothing_waits_any_longer_at_the_end() -> None:
    turns = CompileTurns()
    running, waiting = grammar("a"), grammar("b")
    turns.add("one", running)
    turns.add("two", waiting)
    turns.take()
    assert turns.remove(waiting)
    turns.add("two", waiting)
    assert turns.clear() == [running]
    assert turns.take() is None
