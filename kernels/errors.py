"""Errors of this package that are shown to the user."""

from __future__ import annotations

import reprlib

LONGEST_QUOTE = 80


class ModelError(ValueError):
    """Unusable checkpoint, option or host. The message says what was given, what is allowed, and what to do."""


class MemoryShortageError(ModelError):
    """Less memory than the model needs with these options."""


def quoted(value: object) -> str:
    """Return the beginning of a value's repr, for an error, in a time that does not grow with the value."""
    return _QUOTES.repr(value)[:LONGEST_QUOTE]


_QUOTES = reprlib.Repr()
_QUOTES.maxstring = _QUOTES.maxother = _QUOTES.maxlong = LONGEST_QUOTE
_QUOTES.maxlist = _QUOTES.maxdict = LONGEST_QUOTE // 3
