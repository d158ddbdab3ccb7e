"""Messages of several lines, as they are typed."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.frontend.cli.typed_messages import history_file, message_history, read_message

readline = pytest.importorskip("readline")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own for the history, which is empty before and after."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    readline.clear_history()
    yield tmp_path
    readline.clear_history()
    readline.set_auto_history(True)


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> list[str]:
    """Have `input` return these lines, and then the end; return the list of prompts that were shown."""
    prompts: list[str] = []
    left = iter(lines)

    def read(prompt: str = "") -> str:
        prompts.append(prompt)
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", read)
    return prompts


def entries() -> list[str]:
    return [str(readline.get_history_item(number + 1)) for number in range(readline.get_current_history_length())]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["  Hello "], "Hello"),
        (["a\\", "b\\", " c"], "a\nb\n c"),
        (["a\nb"], "a\nb"),  # pasted, or recalled
        (['"""one"""'], "one"),
        (['"""one', "", "/two", ' three"""  '], "one\n\n/two\n three"),
        (['"""', "one\\", '"""'], "one\\"),
        (['"""one\ntwo"""'], "one\ntwo"),
        (['"""one\ntwo', 'three"""'], "one\ntwo\nthree"),
        (["a\\\nb"], "a\nb"),
        (['/system """Be', 'brief."""'], "/system Be\nbrief."),
        (['/set system """Be', 'brief."""'], "/set system Be\nbrief."),
        (['say """'], 'say """'),
        (['""""""'], ""),
        ([""], ""),
    ],
)
def test_messages(monkeypatch: pytest.MonkeyPatch, lines: list[str], message: str) -> None:
    prompts = type_lines(monkeypatch, *lines, "unread")
    assert read_message("") == message
    assert prompts == [""] * len(lines)


@pytest.mark.parametrize("lines", [[], ["a\\"], ['"""a', "b"]])
def test_the_end_of_the_input_ends_the_messages(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    type_lines(monkeypatch, *lines)
    assert read_message("") is None


@pytest.mark.usefixtures("state")
def test_a_message_is_one_entry_of_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    message = ['"""one', "two\\", 'three"""']
    prompts = type_lines(monkeypatch, "first", *message, "", *message, "a\\", "b")
    with message_history():
        while read_message("> ") is not None:
            pass
        assert entries() == ["first", "\n".join(message), "a\\\nb"]
    assert prompts == ["> ", "> ", "... ", "... ", "> ", "> ", "... ", "... ", "> ", "... ", "> "]
    assert history_file().stat().st_mode & 0o777 == 0o600
    readline.clear_history()
    with message_history():
        assert entries() == ["first", "\n".join(message), "a\\\nb"]


def test_a_history_of_lines_is_read(state: Path) -> None:
    file = history_file()
    assert file.is_relative_to(state)
    file.parent.mkdir(parents=True)
    file.write_text("C:\\new\\table\n/set\n", encoding="utf-8")
    with message_history():
        assert entries() == ["C:\\new\\table", "/set"]
