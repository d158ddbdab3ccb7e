"""Grammars in GBNF allow the same texts in Lark, and errors show the client's own line."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress
from typing import Any

import pytest
from allowed_texts import AllowedTexts
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from quire.protocol.grammar.explanation import explained
from quire.protocol.grammar.gbnf import lark_of


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (r'root ::= "\u00e9" [\u0400-\u04FF] "\U0001F600" "\x09"', ["éж😀\t"], ["e9ж😀\t"]),
        (r'root ::= "\ud83d\ude00" [\ud83d\ude00-\ud83d\ude02]', ["😀😁"], ["😀a"]),
        (r'root ::= "\n\r\t\\\"\[\]"', ['\n\r\t\\"[]'], []),
        ("root ::= [a-z&&x]{3}", ["abc", "&&x"], ["&&Q"]),
        (r"root ::= [\]^/\\~-] [^x] . [[]", ["/\n\n[", "-ab[", r"\ab["], ["xab[", "/xb["]),
        ('root ::= ("a"?)* "b"', ["b", "aab"], ["a"]),
        ('root ::= ("a"{2}){2}', ["aaaa"], ["aa", "aaa"]),
        ('root ::= "a"?* ("b"{2})+{2} "c"{1}', ["aabbbbc", "bbbbbbc"], ["aabbc", "bbbb"]),
        ('root ::= "a"{2,} "b"{0,2}', ["aa", "aaabb"], ["ab", "aabbb"]),
        ('root ::= "a"{0} "b" x{0,0}\nx ::= "c"', ["b"], ["ab", "bc"]),
        (
            'root ::= start Start START x_-y\nstart ::= "s"\nStart ::= "S"\nSTART ::= "T"\nx_-y ::= "u"',
            ["sSTu"],
            ["ssTu"],
        ),
        ('root ::= "a\tb" # a comment with "quotes\n', ["a\tb"], ["ab"]),
        ('root ::= name " is"\nname ::= [a-z ]+', ["tom is", "is is is"], ["is", " is "]),
        ('root ::= ("a" | "ab" "d") "bc"', ["abc", "abdbc"], ["abbc"]),
        ('root ::= "(" root? ")"', ["(())"], ["(()"]),
        ('root ::= "a" |\n  b # one\n\nb ::= (\n  "b" # two\n  |\n)\n', ["a", "b", ""], ["ab"]),
        ('root ::=\r\n  "a" x\r\nx ::= "b"\r\n', ["ab"], ["a"]),
        ('start ::= "s"\nroot ::= start "; start: x"', ["s; start: x"], ["s"]),
        ('root ::= "%json {" ["\'`{}()|*+?.$ #]', ["%json {$", "%json {'"], ["%json {x"]),
        ('start: "a" | b\nb: "::="', ["a", "::="], []),
    ],
)
def test_a_grammar_means_what_llama_cpp_means(grammar: str, right: list[str], wrong: list[str]) -> None:
    AllowedTexts(LLMatcher.grammar_from_lark(lark_of(grammar))).check(right, wrong)


LONGEST = 4
SHORT = ["".join(text) for length in range(LONGEST + 1) for text in itertools.product("abc", repeat=length)]
CLASSES = {"[ab]": "ab", "[^a]": "bc", ".": "abc"}
TIMES = {"*": (0, LONGEST), "+": (1, LONGEST), "?": (0, 1), "{2}": (2, 2), "{2,}": (2, LONGEST), "{0,1}": (0, 1)}
NAMES = ["root", "x", "y"]
ITEMS: Any = st.one_of(
    st.sampled_from(['"a"', '"b"', '"ab"', '"ba"', '""']).map(lambda text: ("text", text)),
    st.sampled_from(list(CLASSES)).map(lambda text: ("class", text)),
    st.sampled_from(NAMES).map(lambda text: ("rule", text)),
)
BODIES: Any = st.recursive(
    ITEMS,
    lambda inner: st.one_of(
        st.tuples(st.just("or"), st.lists(inner, min_size=2, max_size=3)),
        st.tuples(st.just("then"), st.lists(inner, min_size=2, max_size=3)),
        st.tuples(st.just("times"), inner, st.sampled_from(list(TIMES))),
    ),
    max_leaves=6,
)


def written(body: Any) -> str:
    match body:
        case ("or", parts):
            return f"({' | '.join(map(written, parts))})"
        case ("then", parts):
            return f"({' '.join(map(written, parts))})"
        case ("times", part, times):
            return f"({written(part)}){times}"
        case _:
            return str(body[1])


def joined(left: set[str], right: set[str]) -> set[str]:
    return {a + b for a in left for b in right if len(a) + len(b) <= LONGEST}


def texts_of(body: Any, known: dict[str, set[str]]) -> set[str]:
    """Return the short texts of a body, given those of the rules."""
    match body:
        case ("or", parts):
            return {text for part in parts for text in texts_of(part, known)}
        case ("then", parts):
            found = {""}
            for part in parts:
                found = joined(found, texts_of(part, known))
            return found
        case ("times", part, times):
            (least, most), one = TIMES[times], texts_of(part, known)
            found, all_found = {""}, set[str]()
            for number in range(most + 1):
                all_found |= found if number >= least else set()
                found = joined(found, one)
            return all_found
        case ("class", text):
            return set(CLASSES[text])
        case ("rule", name):
            return known[name]
        case _:
            return {body[1].strip('"')}


@settings(max_examples=150, deadline=None)
@given(st.lists(BODIES, min_size=3, max_size=3))
def test_short_texts_are_those_of_the_rules(bodies: list[Any]) -> None:
    known = {name: set[str]() for name in NAMES}
    while (found := {name: texts_of(body, known) for name, body in zip(NAMES, bodies, strict=True)}) != known:
        known = found
    grammar = "\n".join(f"{name} ::= {written(body)}" for name, body in zip(NAMES, bodies, strict=True))
    try:
        allowed = AllowedTexts(LLMatcher.grammar_from_lark(lark_of(grammar)))
    except ValueError:
        assert not known["root"]
        return
    assert [text for text in SHORT if text in allowed] == sorted(known["root"], key=lambda text: (len(text), text))


def test_rules_that_never_meet_stay_lexemes() -> None:
    grammar = r"""root ::= "{" ws (pair ("," ws pair)*)? "}" ws
pair ::= string ":" ws (root | string | number | "true" ws | "[" ws "]" ws)
string ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-f]{4}))* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}"""
    lark = lark_of(grammar)
    assert '"true" T4_WS' in lark
    assert "T2_STRING" in lark
    assert "T3_NUMBER" in lark
    assert "r4_ws" not in lark
    met = lark_of(grammar.replace('"}" ws', '"}" ws ws'))
    assert "r4_ws r4_ws" in met
    assert "T2_STRING" in met


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= " + " | ".join(f'"word{number}" root' for number in range(3000)),
        "root ::= x0 root?\n" + "\n".join(f"x{n} ::= [a-z]{{0,9}} x{n + 1}?" for n in range(800)) + "\nx800 ::= [a-z]",
        "root ::= root x0?\n" + "\n".join(f'x{n} ::= x{n + 1} "a" | root' for n in range(1500)) + "\nx1500 ::= root",
        "root ::= (" + " | ".join("[a-z]*" for _ in range(300)) + ") root",
        "root ::= x root\nx ::= " + "[a-z]? " * 3000,
    ],
)
def test_a_large_grammar_takes_no_longer_to_analyse(grammar: str) -> None:
    began = time.process_time()
    lark_of(grammar)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (
            '# sums\nroot ::= x\n\nx ::= "a" y',
            "GBNF, line 4: there is no rule 'y'; the rules are root, x: x ::=",
        ),
        ('x ::= "a"', "GBNF: there is no rule 'root', with which the text begins; its rules are x"),
        ('root ::= "a\n', "GBNF, line 1: a literal without its '\"': root ::= \"a"),
        ("root ::= x\nx ::= [ab", "GBNF, line 2: a class without its ']': x ::= [ab"),
        ('root ::= "b"\n| "c"', 'GBNF, line 2: expected the name of a rule: | "c"'),
        ('root ::= "b" = "c"', "GBNF, line 1: expected a literal, a class"),
        (r'root ::= "\q"', r"GBNF, line 1: the escape \q is not known"),
        (r'root ::= "\ud83d"', "half of a character"),
        (r'root ::= "\U00110000"', "is no character"),
        ("root ::= []", "a class without characters"),
        ("root ::= [z-a]", "the range from 'z' to 'a' is empty"),
        ('root ::= "a"{3,2}', "{3,2} repeats nothing"),
        ('root ::= "a"' + "?*" * 3000, "more than 150 repetitions of one another"),
        ('root ::= "a"{,2}', "expected {m}, {m,} or {m,n}"),
        ("root ::= <think>", "tokens ('<...>') are not supported"),
        ("root ::= " + "(" * 9000, "more than 150 groups within each other"),
        ("root ::= " + "a" * 9000, "there is no rule 'aaa"),
        ("what is this", "neither Lark nor GBNF"),
    ],
)
def test_an_error_shows_the_line(grammar: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are compared below
        lark_of(grammar)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


def test_errors_of_the_library_show_the_line_too() -> None:
    grammar = 'root ::= "a"\n\n\nx ::= "b"'
    assert explained("at 4(7): too large\n   4 | T1_X: x\n", grammar) == 'GBNF, line 4: too large: x ::= "b"'
    assert explained("at 1(7): too large", 'start: "a"') == "at 1(7): too large"


@pytest.mark.parametrize(
    "part", ["\n", " ", "a", "a\n", "start\n", "a ::= b\n", '"', "[", "{1", "1", "#", "\\", "(", '""', "-"]
)
def test_a_grammar_is_read_in_linear_time(part: str) -> None:
    """Each would take minutes in quadratic time."""
    for head in ("", "root ::= ", 'root ::= "a"{', 'root ::= "a"{1 ', 'root ::= "', "root ::= ["):
        with suppress(ValueError):
            lark_of(head + part * (100_000 // len(part)))
