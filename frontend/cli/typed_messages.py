"""Messages that are typed at a prompt or read from a pipe, and the history of those at a prompt."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

_QUOTES = '"""'
_OPENING = re.compile(rf"\s*(/(?:set\s+)?system\s+)?{_QUOTES}")
_MOST_ENTRIES = 1000  # of the history
_LINE_BREAK = "\x1e"  # within an entry of the history's file, of which every line is an entry


def read_message(prompt: str) -> str | None:
    """Return the next message, or None at the end of the input. With a `prompt` it becomes one entry of the history.

    A line that ends with a backslash continues on the next; what stands between quotes is one message of many lines,
    which may be the text of a command.
    """
    typed = ""
    try:
        typed = input(prompt)
        while _is_open(typed):
            typed += "\n" + input("... " if prompt else "")
    except EOFError:
        return None
    finally:
        if prompt:
            _remember(typed)
    if (opening := _OPENING.match(typed)) is None:
        return typed.replace("\\\n", "\n").removesuffix("\\").strip()
    return (opening[1] or "") + typed[opening.end() :].rstrip().removesuffix(_QUOTES).strip()


def _is_open(typed: str) -> bool:
    if opening := _OPENING.match(typed):
        return not typed[opening.end() :].rstrip().endswith(_QUOTES)
    return typed.endswith("\\")


def _remember(typed: str) -> None:
    """Add a message to the history as a whole, so that the arrow keys recall all of its lines."""
    with contextlib.suppress(ImportError):
        import readline

        if typed.strip() and typed != readline.get_history_item(readline.get_current_history_length()):
            readline.add_history(typed)


@contextlib.contextmanager
def message_history() -> Iterator[None]:
    """Give `input` editing and a history, which only its owner may read and which lasts from one chat to the next."""
    try:
        import readline
    except ImportError:
        yield
        return
    file = history_file()
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    _replace_in_history(_LINE_BREAK, "\n")
    readline.set_history_length(_MOST_ENTRIES)
    readline.set_auto_history(False)  # it would add every line of a message as an entry of its own
    try:
        yield
    finally:
        _replace_in_history("\n", _LINE_BREAK)
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            readline.write_history_file(file)


def _replace_in_history(old: str, new: str) -> None:
    import readline

    for position in range(readline.get_current_history_length()):
        entry = readline.get_history_item(position + 1)
        if old in entry:
            readline.replace_history_item(position, entry.replace(old, new))


def history_file() -> Path:
    """Return the file of the messages that were typed."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "quire" / "chat_history"
