"""Patterns of modules match as in PEFT, and in bounded time."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.adapters.patterns import ModulePatterns
from quire.kernels.errors import ModelError

ATOMS = st.sampled_from(["a", "b", ".", r"\.", r"\d", r"\W", "[ab]", "[^a.]", "[0-9_]", "1", "^", "$", "()"])
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda both: f"({both[0]}|{both[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "*?", "+?"])).map(
            lambda both: f"(?:{both[0]}){both[1]}"
        ),
    ),
    max_leaves=8,
)


@given(EXPRESSIONS | st.text("ab.", max_size=4), st.text("ab.1_", max_size=8))
def test_as_the_expressions_of_python(expression: str, module: str) -> None:
    expected = re.match(rf"(.*\.)?({expression})$", module) is not None
    assert ModulePatterns("rank_pattern", {expression: True}).get(module, False) == expected


def test_the_first_match_holds() -> None:
    patterns = ModulePatterns("rank_pattern", {r"^model\.layers\.1\..*": 1, "self_attn.q_proj": 2, "q_proj": 3})
    modules = ("model.layers.1.self_attn.q_proj", "model.layers.2.self_attn.q_proj", "q_proj", "my_q_proj")
    assert [patterns.get(module, 0) for module in modules] == [1, 2, 3, 0]


@pytest.mark.parametrize(
    "expression", ["(a+)+$", "(a*)*b", "(a|a)*b", "((a?){500}){500}b", ".*.*.*.*.*.*.*.*b", "(a{1,9999}){9999}b"]
)
def test_no_expression_takes_long(expression: str) -> None:
    patterns = ModulePatterns("rank_pattern", {expression: 1})
    with contextlib.suppress(ModelError):  # which says that it takes too many steps
        assert patterns.get("a" * 250 + "b" * (expression == "(a+)+$"), 0) == 0


@pytest.mark.parametrize(
    "expression", ["(", "*", r"(a)\1", "(?=a)a", "(?i:a)", r"\ba", "a{2,1}", "(" * 60 + ")" * 60, "a++"]
)
def test_what_is_no_supported_expression_is_an_error(expression: str) -> None:
    with pytest.raises(ModelError, match=r"f has .* which is no regular expression"):
        ModulePatterns("f", {expression: 1}).get("a", 0)


def test_long_patterns_are_an_error() -> None:
    ModulePatterns("f", {"a" * 4096: 1})
    with pytest.raises(
        ModelError, match=r"f has the pattern 'a+\.\.\.a+', of 4097 characters; at most 4096 are allowed"
    ):
        ModulePatterns("f", {"b": 1, "a" * 4097: 1})


def test_many_patterns_are_too_many() -> None:
    with pytest.raises(ModelError, match="f has 10001 patterns; 10000 are allowed"):
        ModulePatterns("f", {str(number): 1 for number in range(10001)})
    patterns = ModulePatterns("f", {f"x{number}": 1 for number in range(10000)})
    with pytest.raises(ModelError, match="write fewer patterns"):
        assert sum(patterns.get(f"layers.{number}", 0) for number in range(400)) == 0
