"""Regular expressions of clients mean for llguidance what they mean in Python, and what no one can read is refused."""

from __future__ import annotations

import re
import string
import warnings
from contextlib import suppress

import pytest
from allowed_texts import AllowedTexts
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from quire.protocol.grammar.regex_dialect import translate_regex

CHARACTERS = string.printable + "\x00\x08\x01é😀€"


def allowed_by(pattern: str) -> AllowedTexts:
    return AllowedTexts(LLMatcher.grammar_from_regex(translate_regex(pattern)))


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("[^&&||;]{2}", ["ab", "-~"], ["&&", "a&", "a|", "a;"]),
        ("[a-c~~b]", ["a", "b", "c", "~"], ["d"]),
        ("[a-z--b]", ["z", "-", "B"], ["+", "~"]),
        ("[+--]", ["+", ",", "-"], ["."]),
        ("[^[]", ["a", "]"], ["["]),
        ("[[a]", ["[", "a"], ["]"]),
        ("[a[b]]", ["a]", "[]"], ["a", "[a"]),
        ("[]a]", ["]", "a"], ["["]),
        (r"\[[^]]*\]", ["[a[]", "[]"], ["[]]"]),
        ("a{", ["a{"], ["a"]),
        ("a{b}", ["a{b}"], ["ab"]),
        ("a{1,b}{2}", ["a{1,b}}"], ["a{1,b}a{1,b}"]),
        ("a{2}{", ["aa{"], ["aa"]),
        ('{"a": [0-9]}', ['{"a": 7}'], ["7"]),
        (r"[\w-.]+@", ["a-b.c@"], ["a/@"]),
        (r"[+-\d]", ["+", "-", "5"], [",", "/"]),
        (r"\<b\>", ["<b>"], ["b"]),
        (r"[\b]\0\cJ", ["\x08\x00\n"], ["b0J"]),
        (r"\ud83d\ude00[\ud83d\ude00-\uD83D\uDE02]", ["😀😁"], ["😀"]),
        (r"\é\/\-\ ", ["é/- "], ["e"]),
        (r"\x7b[\x5b\x5d]\u{41}", ["{[A", "{]A"], ["{A"]),
        (r"[^\s&&\d]", ["a"], ["&", "5", " "]),
    ],
)
def test_a_pattern_means_what_clients_mean(pattern: str, right: list[str], wrong: list[str]) -> None:
    allowed_by(pattern).check(right, wrong)


@given(
    st.lists(st.sampled_from([*"&-~[^ab |#+", "&&", "--", "~~", r"\]", r"\[", r"\d", r"\-", "a-c", "é"]), max_size=8),
    st.sampled_from(["", "^"]),
)
def test_classes_have_the_members_of_pythons(members: list[str], negation: str) -> None:
    pattern = f"[{negation}{''.join(members)}]"
    try:
        with warnings.catch_warnings(action="ignore"):  # of a future with sets
            reference = re.compile(pattern)
    except re.error:
        return
    allowed = allowed_by(pattern)
    for char in CHARACTERS:
        assert (char in allowed) == bool(reference.fullmatch(char)), (pattern, char)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("x{,3}", "a quantifier in Python and text in ECMA-262"),
        ("[[:alpha:]]", r"has '\[:alpha:\]', which ECMA-262 and Python don't know; write its characters"),
        ("ab[c", "without its end"),
        ("[^]", r"without its end; close it with ']', or write \\\[ or \\\]"),
        ("(?x)a b", "the flag x"),
        ("(?ix: a)", "the flag x"),
        (r"\ud83d", "half of a character"),
        (r"\ude00\ud83d", "half of a character"),
        ("a" * 500 + "[", "at character 501"),
    ],
)
def test_what_is_read_in_different_ways_is_refused(pattern: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        translate_regex(pattern)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "part", ["[", "[:", "[[:", "(?x", "x", "(?a", "{", "{1", "{,", "\\p{", "\\u", "-", "a-", "1", "\\"]
)
def test_a_pattern_is_read_in_linear_time(part: str) -> None:
    """Each would take minutes in quadratic time."""
    for head in ("", "[", "(?", "{", "[[:", "\\p{"):
        with suppress(ValueError):
            translate_regex(head + part * (100_000 // len(part)))
