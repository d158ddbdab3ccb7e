"""Changes from picture to picture, so that a viewer need not get the whole engine four times a second."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from quire.frontend.http.operations.pictures import PagesPicture, Picture, PrefixPicture
from quire.frontend.http.transport.sse import event
from quire.protocol.messages import BatchEntry, WaitingEntry

PICTURES_PER_MAP = 2  # so often are the cells of the page map compared
PICTURES_PER_PREFIXES = 4
_GAP = 8  # equal bytes that cost less within a run than between two


class PagesChange(msgspec.Struct, omit_defaults=True):
    """Of a `PagesPicture`: the new numbers, and runs of new bytes in `cells`, each as [index, bytes]."""

    num_pages: list[int] | UnsetType = UNSET
    runs: list[tuple[int, bytes]] = []


class PrefixChange(msgspec.Struct, omit_defaults=True):
    """A prefix of the new list: `new`, or the old list's one at index `old` with other `hits` and `users`."""

    new: PrefixPicture | UnsetType = UNSET
    old: int | UnsetType = UNSET
    hits: int | UnsetType = UNSET
    users: int | UnsetType = UNSET


class Change(msgspec.Struct, omit_defaults=True):
    """Differences from the previous picture. Fields that are left out are as they were, but `ttft` and `itl` are None.

    `stats` has the changed fields. `prefixes` is the whole new list.
    """

    stats: dict[str, Any] | UnsetType = UNSET
    batch: list[BatchEntry] | UnsetType = UNSET
    batch_size: int | UnsetType = UNSET
    waiting: list[WaitingEntry] | UnsetType = UNSET
    waiting_tokens: int | UnsetType = UNSET
    pages: PagesChange | UnsetType = UNSET
    prefixes: list[PrefixChange] | UnsetType = UNSET
    prefill_tokens_per_second: float | UnsetType = UNSET
    decode_tokens_per_second: float | UnsetType = UNSET
    draft_tokens_per_second: float | UnsetType = UNSET
    accepted_tokens_per_second: float | UnsetType = UNSET
    ttft: float | UnsetType = UNSET
    itl: float | UnsetType = UNSET


_PLAIN = (
    "batch", "batch_size", "waiting", "waiting_tokens", "prefill_tokens_per_second", "decode_tokens_per_second",
    "draft_tokens_per_second", "accepted_tokens_per_second",
)  # fmt: skip


class Feed:
    """The latest picture, and its change from the one before.

    `number` counts the pictures. What is large, the page map and the prefixes, may be a second old in all of them.
    """

    def __init__(self) -> None:
        self.number = 0
        self._picture: Picture | None = None
        self._change = b""
        self._whole = b""  # the event of the whole picture, once a viewer needs it

    def publish(self, picture: Picture) -> None:
        """Take the next picture."""
        self.number += 1
        self._whole = b""
        if self._picture is not None:
            if self.number % PICTURES_PER_MAP and _is_same_map(self._picture.pages, picture.pages):
                picture.pages.cells = self._picture.pages.cells
            if self.number % PICTURES_PER_PREFIXES:
                picture.prefixes = self._picture.prefixes
            change = _change(self._picture, picture)
            self._change = b"" if change is None else event(msgspec.json.encode(change), "change")
        self._picture = picture

    def event_after(self, number: int) -> bytes:
        """Return the event for a viewer whose last picture has this number: a change, or the whole picture."""
        if self._change and number == self.number - 1:
            return self._change
        self._whole = self._whole or event(msgspec.json.encode(self._picture), "picture")
        return self._whole


def _change(old: Picture, new: Picture) -> Change | None:
    """Return what changed; None if the map has another size, which only a whole picture can tell."""
    if not _is_same_map(old.pages, new.pages):
        return None
    change = Change()
    for name in _PLAIN:
        if getattr(old, name) != (value := getattr(new, name)):
            setattr(change, name, value)
    if stats := {name: value for name, value in new.stats.items() if old.stats.get(name) != value}:
        change.stats = stats
    if old.pages != new.pages:
        numbers = UNSET if old.pages.num_pages == new.pages.num_pages else new.pages.num_pages
        change.pages = PagesChange(numbers, list(_runs(old.pages.cells, new.pages.cells)))
    if old.prefixes != new.prefixes:
        change.prefixes = _prefixes(old.prefixes, new.prefixes)
    change.ttft = UNSET if new.ttft is None else new.ttft
    change.itl = UNSET if new.itl is None else new.itl
    return change


def _is_same_map(old: PagesPicture, new: PagesPicture) -> bool:
    return (old.block_size, old.pages_per_cell, len(old.cells)) == (new.block_size, new.pages_per_cell, len(new.cells))


def _runs(old: bytes, new: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the differing parts of `new` with their indices; parts that lie close together are one."""
    start, end = 0, -1
    different = np.frombuffer(old, np.uint8) != np.frombuffer(new, np.uint8)
    for index in np.flatnonzero(different).tolist():
        if end >= 0 and index - end > _GAP:
            yield start, new[start:end]
            end = -1
        if end < 0:
            start = index
        end = index + 1
    if end >= 0:
        yield start, new[start:end]


def _prefixes(old: list[PrefixPicture], new: list[PrefixPicture]) -> list[PrefixChange]:
    places = {_texts(prefix): index for index, prefix in enumerate(old)}
    return [
        PrefixChange(new=prefix)
        if (index := places.get(_texts(prefix))) is None
        else PrefixChange(old=index, hits=prefix.hits, users=prefix.users)
        for prefix in new
    ]


def _texts(prefix: PrefixPicture) -> tuple[int, bool, str, str]:
    return prefix.pages, prefix.is_salted, prefix.first, prefix.last
