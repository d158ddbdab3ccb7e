"""Pictures of the engine for the page: snapshots with rates, and with text in place of token ids."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.frontend.text.tokenizer import Tokenizer
from quire.protocol.messages import BatchEntry, EngineSnapshot, HotPrefix, SchedulerStats, WaitingEntry

MAX_BATCH = 32  # requests of the last step in a picture

MAX_PAUSE = 10.0
"""Most seconds between two looks at an engine."""

_MAX_COST = 0.01  # share of the engine's time that looks at it may take


def pause_after(seconds: float) -> float:
    """Return the pause after a look at the engine that took so many seconds, by a clock on the wall.

    On a busy machine a look may seem to take long that has only waited for a processor: so there is a bound.
    """
    return min(seconds / _MAX_COST, MAX_PAUSE)


class PrefixPicture(msgspec.Struct):
    """A `HotPrefix` with the text of its first and last page, "" where viewers must not read it."""

    hits: int
    pages: int
    users: int
    is_salted: bool
    first: str
    last: str


class PagesPicture(msgspec.Struct):
    """A `PageMap`; in JSON, `cells` are base64."""

    block_size: int
    num_pages: list[int]
    pages_per_cell: int
    cells: bytes


class Picture(msgspec.Struct):
    """The engine at one moment.

    `stats` holds the fields of `SchedulerStats`; entries of `batch` and `waiting` are arrays of their fields. `batch`
    has requests in prefill first and is cut, `batch_size` counts all. Rates are those of the whole engine since the
    previous picture. `ttft` and `itl` are means over this server's requests in seconds, None without a measurement.
    Seconds and rates are rounded to what a reader can tell apart.
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
    draft_tokens_per_second: float = 0.0
    accepted_tokens_per_second: float = 0.0
    ttft: float | None = None
    itl: float | None = None


class PictureMaker:
    """Makes pictures of consecutive snapshots; with `shows_prompts` they have texts of prompts."""

    def __init__(self, tokenizer: Tokenizer | None, shows_prompts: bool = True) -> None:
        self._tokenizer = tokenizer
        self._shows_prompts = shows_prompts
        self._before: EngineSnapshot | None = None

    def picture(self, snapshot: EngineSnapshot) -> Picture:
        """Return the picture of the next snapshot. Without a tokenizer, prefixes are shown as token ids."""
        before, self._before = self._before or snapshot, snapshot
        seconds = snapshot.timestamp - before.timestamp
        prefill = snapshot.total_prefill_tokens - before.total_prefill_tokens
        decode = snapshot.total_decode_tokens - before.total_decode_tokens
        drafts = snapshot.total_draft_tokens - before.total_draft_tokens
        accepted = snapshot.total_accepted_tokens - before.total_accepted_tokens
        return Picture(
            stats=_rounded(snapshot.stats),
            batch=sorted(snapshot.batch, key=lambda entry: not entry.in_prefill)[:MAX_BATCH],
            batch_size=snapshot.batch_size,
            waiting=[msgspec.structs.replace(entry, seconds=round(entry.seconds, 1)) for entry in snapshot.waiting],
            waiting_tokens=snapshot.waiting_tokens,
            pages=PagesPicture(**msgspec.structs.asdict(snapshot.page_map)),
            prefixes=[self._prefix(prefix) for prefix in snapshot.prefixes],
            prefill_tokens_per_second=_rate(prefill, seconds),
            decode_tokens_per_second=_rate(decode, seconds),
            draft_tokens_per_second=_rate(drafts, seconds),
            accepted_tokens_per_second=_rate(accepted, seconds),
        )

    def _prefix(self, prefix: HotPrefix) -> PrefixPicture:
        first, last = self._text(prefix.first_token_ids), self._text(prefix.last_token_ids)
        return PrefixPicture(prefix.hits, prefix.pages, prefix.users, prefix.is_salted, first, last)

    def _text(self, token_ids: list[int]) -> str:
        if not self._shows_prompts:
            return ""
        if self._tokenizer is None:
            return " ".join(map(str, token_ids))
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _rounded(stats: SchedulerStats) -> dict[str, Any]:
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in msgspec.structs.asdict(stats).items()
    }


def _rate(number: int, seconds: float) -> float:
    return round(number / seconds, 1) if seconds > 0 else 0.0
