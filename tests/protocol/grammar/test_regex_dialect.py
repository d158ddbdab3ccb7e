"""Regular expressions of clients mean for llguidance what they mean in their dialect; what can't be read is refused."""

from __future__ import annotations

import itertools
import json
import re
import string
import warnings
from contextlib import suppress
from typing import Any

import pytest
from allowed_texts import AllowedTexts
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from quire.protocol.grammar.json_schema import enforced_schema
from quire.protocol.grammar.regex_dialect import ECMA, PYTHON, translate_regex

CHARACTERS = string.printable + "\x00\x08\x01é😀€"


def allowed_by(pattern: str) -> AllowedTexts:
    return AllowedTexts(LLMatcher.grammar_from_regex(translate_regex(pattern, PYTHON)))


def allowed_by_schema(pattern: str) -> AllowedTexts:
    schema = json.dumps(enforced_schema({"type": "string", "pattern": pattern}))
    options: Any = {"lenient": False, "whitespace_flexible": False}
    return AllowedTexts(LLMatcher.grammar_from_json_schema(schema, overrides=options))


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
        ("a{,2}b{,}", ["", "aab", "bbb"], ["aaa"]),
        (r"\w\s\S", ["²\x1ca", "é\x85_"], ["-  ", "a \x1c"]),
        ("(?P<n>a)(?s:.)", ["a\n"], ["a"]),
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
        ("a*+b", r"has '\*\+', one quantifier after another, which is possessive or an error"),
        ("a{2}{3}", "one quantifier after another"),
        ("a{,3}+", "one quantifier after another"),
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
        translate_regex(pattern, PYTHON)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^\d\w\s$", ["1a ", "1_\ufeff", "1a\xa0"], ["٣a ", "1é ", "1²\t", "1a\x1c", "1a\x85"]),
        (r"^\D\W\S$", ["٣é\x85"], ["1--", "aa-", "a- "]),
        (r"^[\d-][^\w]$", ["1é", "--"], ["٣é", "1a"]),
        ("^.$", ["a", "\x85"], ["\r", "\n", "\u2028"]),
        ("^(?s:.)$", ["\n"], ["ab"]),
        ("b", ["abc", "b"], ["ac"]),
        (r"^[\]a][^\]]$", ["]a", "a["], ["]]"]),
    ],
)
def test_a_pattern_of_a_schema_means_what_ecma_says(pattern: str, right: list[str], wrong: list[str]) -> None:
    written = ([json.dumps(text, ensure_ascii=False) for text in texts] for texts in (right, wrong))
    allowed_by_schema(pattern).check(*written)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("x{,3}", "a quantifier in Python and text in ECMA-262"),
        ("[]a]", r"begins with '\[\]', where '\]' is its end in ECMA-262 and one of its characters in Python"),
        (r"\[[^]]*\]", r"begins with '\[\^\]'"),
        ("a[^]*", r"or \[\\s\\S\] for any character"),
    ],
)
def test_what_python_and_ecma_read_differently_is_refused_in_schemas(pattern: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        translate_regex(pattern, ECMA)


ATOMS = [
    "a",
    "b",
    ".",
    "[ab]",
    "[^a]",
    r"[\d-]",
    r"\d",
    r"\w",
    r"\W",
    r"\s",
    r"\S",
    r"\.",
    r"\n",
    "",
    "(?i:A)",
    "1",
    "-",
]
QUANTIFIERS = ["", "", "", "*", "+", "?", "{2}", "{1,2}", "{,1}", "{1,}", "*?", "{a}", "{0}", "*+"]
PATTERNS = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.builds("({}){}".format, inner, st.sampled_from(QUANTIFIERS)),
        st.builds("(?:{}|{}){}".format, inner, inner, st.sampled_from(QUANTIFIERS)),
        st.lists(st.builds("{}{}".format, inner, st.sampled_from(QUANTIFIERS)), max_size=3).map("".join),
    ),
    max_leaves=6,
)
SHORT = ["".join(text) for length in range(4) for text in itertools.product("ab1-\n", repeat=length)]
TEXTS = [*SHORT, *"AB é٣²_\r\x1c", "aA", "abab", "aaaa", "a{a}"]


@settings(max_examples=80)
@given(PATTERNS)
def test_short_texts_match_as_in_python(pattern: str) -> None:
    try:
        reference = re.compile(pattern)
        allowed = allowed_by(pattern)
    except (re.error, ValueError):  # an error of one of them, or no text but the empty one, which is refused
        assume(False)
    assert [text for text in TEXTS if text in allowed] == [text for text in TEXTS if reference.fullmatch(text)]


@settings(max_examples=80)
@given(PATTERNS, st.sampled_from(["{}", "^{}", "{}$", "^(?:{})$"]))
def test_short_strings_match_as_in_ecma(pattern: str, form: str) -> None:
    """Python's re reads the patterns as ECMA-262 does, but for sets, which are written out, and the end."""
    pattern = form.format(pattern)
    own = {r"\s": r"[\s\ufeff]", r"\S": r"[^\s\ufeff]", ".": r"[^\n\r]", "$": r"\Z", r"\.": r"\."}
    written = re.sub(r"\\?[sS.$]", lambda found: own.get(found[0], found[0]), pattern)
    try:
        reference = re.compile(written, re.ASCII)
        allowed = allowed_by_schema(pattern)
    except (re.error, ValueError):
        assume(False)
    got = [text for text in TEXTS if json.dumps(text, ensure_ascii=False) in allowed]
    assert got == [text for text in TEXTS if reference.search(text)]


@pytest.mark.parametrize(
    "part", ["[", "[:", "[[:", "(?x", "x", "(?a", "{", "{1", "{,", "\\p{", "\\u", "-", "a-", "1", "\\"]
)
def test_a_pattern_is_read_in_linear_time(part: str) -> None:
    """Each would take minutes in quadratic time."""
    for head in ("", "[", "(?", "{", "[[:", "\\p{"):
        with suppress(ValueError):
            translate_regex(head + part * (100_000 // len(part)), PYTHON)
