"""Finds the marks that structure an answer (such as `<tool_call>`) in a text that arrives in pieces."""

from __future__ import annotations

MAX_GAP = 8  # characters of white space next to a mark that belong to it; what is more belongs to the text


def match_mark(text: str, mark: str) -> int | None:
    """Where `mark`, which is not empty, ends in `text`, after a gap; 0 if it may still come; None if it does not."""
    beginning = text[: MAX_GAP + 1]
    gap = len(beginning) - len(beginning.lstrip())
    if gap > MAX_GAP:
        return None
    rest = text[gap : gap + len(mark)]
    if rest == mark:
        return gap + len(mark)
    return 0 if mark.startswith(rest) else None


def partial_mark(text: str, mark: str) -> int:
    """How many of the last characters of `text` may be the beginning of `mark`."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)


def gap_before(text: str, end: int) -> int:
    """How many characters of white space before `text[end]` may belong to a mark there."""
    before = text[max(0, end - MAX_GAP) : end]
    return len(before) - len(before.rstrip())
