"""Grammars in GBNF allow the same texts in Lark, and errors show the client's own line."""

from __future__ import annotations

from contextlib import suppress

import pytest
from allowed_texts import AllowedTexts
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
