"""Markdown on a terminal's screen while it streams."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from screens import Screen

from quire.frontend.cli.markdown import MarkdownStream

BLOCKS = [
    "# The *king*",
    "Once **upon a\ntime** there was a `king`, and [a fox](https://example.org/fox).",
    "- one\n- two **bold**\n  - nested, and so long that it does not fit a line\n\n- loose",
    "1. first\n2. second\n\n7. seventh",
    "```python\ndef f(x):\n    return x  # comment\n\n\nprint(f(1))\n```",
    "| name | value |\n|---|---:|\n| a | **1** |\n| 狐 | 22 |",
    "> quoted\n> twice\n\n> again",
    "日本語の文章はここにあります。とても長い文章なので折り返されます。",
    "<b>no</b> html & <think>none</think>",
    "A title\n---",
    "---",
    "    indented code\n    more",
    "[ref]: https://example.org",
    "~~gone~~ \\*kept\\* **open",
    "```",
    "\t\ttabs\tin a line",
]
DOCUMENTS = st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=5).map("\n\n".join) | st.text(
    st.sampled_from("a *_`#>-|1.\n\t[]()~é狐"), min_size=1, max_size=60
)


def shown(pieces: list[str], columns: int = 60, rows: int = 1000) -> str:
    """Return the screen after the pieces; each is rendered, however fast they come."""
    screen = Screen(columns)
    stream = MarkdownStream(screen.feed, lambda: (columns, rows), lambda: 0.0)
    for piece in pieces:
        stream.feed(piece)
    stream.end()
    return screen.text


@settings(max_examples=60, deadline=None)
@given(DOCUMENTS, st.integers(1, 9), st.integers(10, 70))
@example("# A\n\nb **c", 1, 20)
def test_the_screen_shows_the_same_however_a_text_streams(text: str, size: int, columns: int) -> None:
    pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
    assert shown(pieces, columns).split() == shown([text], columns).split()


@given(DOCUMENTS, st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_no_word_is_lost(text: str, size: int) -> None:
    text = text.replace("[ref]: https://example.org", "")
    plain = " ".join(shown([text[begin : begin + size] for begin in range(0, len(text), size)], 30).split())
    for word in re.findall(r"\w{3,}", text):
        if word not in ("python", "nested", "https", "example", "org"):
            assert word in plain.replace(" ", ""), (word, plain)


def test_blocks_look_like_what_they_are() -> None:
    text = "\n\n".join(BLOCKS[:7])
    pieces = [text[begin : begin + 3] for begin in range(0, len(text), 3)]
    assert shown(pieces).splitlines() == [
        "The king",
        "",
        "Once upon a",
        "time there was a king, and a fox (https://example.org/fox).",
        "",
        " • one",
        " • two bold",
        "    • nested, and so long that it does not fit a line",
        " • loose",
        "",
        " 1 first",
        " 2 second",
        " 3 seventh",
        "",
        " def f(x):",
        "     return x  # comment",
        "",
        "",
        " print(f(1))",
        "",
        " name  value",
        " ───────────",
        " a         1",
        " 狐       22",
        "",
        "▌ quoted",
        "▌ twice",
        "",
        "▌ again",
    ]


@pytest.mark.parametrize("rows", [4, 7])
def test_a_block_that_is_longer_than_the_screen_ends_as_it_should(rows: int) -> None:
    text = "\n".join(f"- item {number} of **many**" for number in range(30))
    pieces = [text[begin : begin + 5] for begin in range(0, len(text), 5)]
    last = shown(pieces, 40, rows).splitlines()
    assert last[-rows + 1 :] == [f" • item {number} of many" for number in range(31 - rows, 30)]
    assert len(last) == 30


def test_styles_are_those_of_markdown() -> None:
    written: list[str] = []
    stream = MarkdownStream(written.append, lambda: (60, 20), lambda: 0.0)
    stream.feed("a **bold** `code`")
    stream.end()
    assert written == ["a \x1b[1mbold\x1b[0m \x1b[36mcode\x1b[0m", "\n"]


def test_renderings_take_a_small_part_of_the_time() -> None:
    now, renderings = 0.0, 0

    def clock() -> float:
        return now

    def write(text: str) -> None:
        nonlocal now, renderings
        now += 0.01  # as long as a rendering takes
        renderings += 1

    stream = MarkdownStream(write, lambda: (60, 20), clock)
    for _ in range(1000):
        now += 0.001
        stream.feed("word ")
    assert renderings <= 1 + now / 0.1
    stream.end()
    assert now > 1
