"""Checks of the values of a trace's row; each raises ValueError that says what was given and what is allowed."""

from __future__ import annotations

MOST_TOKENS = 1 << 24
"""Tokens of a prompt or an answer: more than any model takes, and few enough for the names of a prompt's blocks."""

_MOST_SHOWN = 60  # characters of a value that a message repeats


def shown(value: object) -> str:
    """A value as a message repeats it."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


def check_length(name: str, tokens: int) -> None:
    """Raises ValueError for a length in tokens that no request has."""
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{name} is {shown(tokens)}; it must be a whole number from 1 to {MOST_TOKENS}")


def whole_number(name: str, text: str) -> int:
    """A column's whole number, which some tools write as 374.0."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        if (number := float(text)).is_integer():
            return int(number)
    except ValueError:
        pass
    raise ValueError(f"{name} is {shown(text)}; it must be a whole number")


def check_seconds(name: str, seconds: float) -> None:
    """Raises ValueError for what is no time since a beginning."""
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{name} is {shown(seconds)}; it must be a finite number of at least 0")
