"""The number of values in JSON, counted before it is decoded: decoding takes time in proportion."""

from __future__ import annotations

MAX_VALUES = 1 << 19
"""Entries of all lists and objects; token ids among them are decoded fast."""

MAX_TEXTS = 1 << 17
"""Texts, the names of fields among them."""

MAX_CONTAINERS = 1 << 15
"""Lists and objects, and entries of objects, which are decoded slowly."""


def has_few_marks(data: bytes) -> bool:
    """Return whether JSON has so few commas, quotes and brackets that it has few values, whatever its texts hold."""
    return data.count(b'"') <= 2 * MAX_TEXTS and _has_few_values(data)


def has_few_values(data: bytes) -> bool:
    """Return whether JSON has no more values than can be decoded without a pause for all streams."""
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
    return unescaped.count(b'"') <= 2 * MAX_TEXTS and _has_few_values(
        b"".join(unescaped.split(b'"')[::2])  # without the texts, whose commas and brackets do not count
    )


def _has_few_values(data: bytes) -> bool:
    return data.count(b",") <= MAX_VALUES and sum(map(data.count, (b"[", b"{", b":"))) <= MAX_CONTAINERS
