"""Pictures for the page: snapshots of the engine with rates, and with text in place of token ids."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.frontend.text.tokenizer import Tokenizer
from quire.protocol.messages import BatchEntry, EngineSnapshot, HotPrefix, WaitingEntry


class PrefixPicture(msgspec.Struct):
    """A `HotPrefix` with the text of its first and last page."""

    hits: int
    pages: int
    users: int
    is_salted: bool
    first: str
    last: str


class PagesPicture(msgspec.Struct):
    """A `PageMap`; in JSON, `cells` are base64."""

    page_size: int
    num_pages: list[int]
    pages_per_cell: int
    cells: bytes


class Picture(msgspec.Struct):
    """The engine at one moment.

    `stats` holds the fields of `SchedulerStats`; entries of `batch` and `waiting` are arrays of their fields. Rates are
    those of the whole engine since the previous picture. `ttft` and `itl` are means over this server's requests in
    seconds, None without a measurement.
    """

    stats: dict[str, Any]
    batch: list[BatchEntry]
    batch_size: int
    waiting: list[WaitingEntry]
    waiting_tokens: int
    pages: PagesPicture
    prefixes: list[PrefixPicture]
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    ttft: float | None = None
    itl: float | None = None


class PictureMaker:
    """Makes pictures of consecutive snapshots."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._before: EngineSnapshot | None = None

    def picture(self, snapshot: EngineSnapshot) -> Picture:
        """Return the picture of the next snapshot. Without a tokenizer, prefixes are shown as token ids."""
        before, self._before = self._before or snapshot, snapshot
        seconds = snapshot.timestamp - before.timestamp
        prefill = snapshot.total_prefill_tokens - before.total_prefill_tokens
        decode = snapshot.total_decode_tokens - before.total_decode_tokens
        return Picture(
            stats=msgspec.structs.asdict(snapshot.stats),
            batch=snapshot.batch,
            batch_size=snapshot.batch_size,
            waiting=snapshot.waiting,
            waiting_tokens=snapshot.waiting_tokens,
            pages=PagesPicture(**msgspec.structs.asdict(snapshot.page_map)),
            prefixes=[self._prefix(prefix) for prefix in snapshot.prefixes],
            prefill_tokens_per_second=prefill / seconds if seconds > 0 else 0.0,
            decode_tokens_per_second=decode / seconds if seconds > 0 else 0.0,
        )

    def _prefix(self, prefix: HotPrefix) -> PrefixPicture:
        first, last = self._text(prefix.first_token_ids), self._text(prefix.last_token_ids)
        return PrefixPicture(prefix.hits, prefix.pages, prefix.users, prefix.is_salted, first, last)

    def _text(self, token_ids: list[int]) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, token_ids))
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
