"""The page at `/`, and its live view of the engine: snapshots with rates, and with text in place of token ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.errors import EngineDeadError
from quire.frontend.http.documentation.operation import Operation
from quire.frontend.http.transport.responses import static_files
from quire.frontend.http.transport.sse import event
from quire.frontend.metrics.recent import RecentRates
from quire.frontend.text.tokenizer import Tokenizer
from quire.protocol.messages import BatchEntry, EngineSnapshot, HotPrefix, WaitingEntry


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
            stats=msgspec.structs.asdict(snapshot.stats),
            batch=snapshot.batch,
            batch_size=snapshot.batch_size,
            waiting=snapshot.waiting,
            waiting_tokens=snapshot.waiting_tokens,
            pages=PagesPicture(**msgspec.structs.asdict(snapshot.page_map)),
            prefixes=[self._prefix(prefix) for prefix in snapshot.prefixes],
            prefill_tokens_per_second=prefill / seconds if seconds > 0 else 0.0,
            decode_tokens_per_second=decode / seconds if seconds > 0 else 0.0,
            draft_tokens_per_second=drafts / seconds if seconds > 0 else 0.0,
            accepted_tokens_per_second=accepted / seconds if seconds > 0 else 0.0,
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


PERIOD = 0.25  # seconds between two pictures
_MAX_COST = 0.01  # share of the engine's time; a pool that takes longer to snapshot is polled less often
_PATIENCE = 5.0  # seconds after which a long step is reported


class History(msgspec.Struct):
    """The last minute of this server's requests: [tokens per second, TTFT, ITL] of each quarter second."""

    points: list[tuple[float, float | None, float | None]]


class Problem(msgspec.Struct):
    """The reason why there is no picture now."""

    message: str


class EngineView:
    """Server-sent events for any number of viewers: `history` once, then `picture` or `problem` repeatedly.

    While there are viewers, one task polls the engine for snapshots, every `PERIOD` seconds or less often, so that they
    take less than a hundredth of the engine's time. A viewer that reads slowly skips pictures and delays no other. All
    methods run on one event loop.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        recent: RecentRates,
        is_draining: Callable[[], bool] = lambda: False,
        shows_prompts: bool = True,
    ) -> None:
        """Observe `llm` through `recent`, its observer; `is_draining` returns whether the server is shutting down.

        `shows_prompts`: viewers may read the prompts of all.
        """
        self._shows_prompts = shows_prompts
        self._llm = llm
        self._recent = recent
        self._is_draining = is_draining
        self._event = b""  # the latest, empty before the first
        self._updated = asyncio.Event()
        self._sent_until = 0.0  # time of the latest recent point that a picture included
        self._viewers = 0
        self._poller: asyncio.Task[None] | None = None

    @property
    def viewers(self) -> int:
        """Number of viewers now."""
        return self._viewers

    @property
    def is_polling(self) -> bool:
        """True if the engine is being polled for snapshots."""
        return self._poller is not None

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of one viewer, until it disconnects or the server drains."""
        self._join()
        try:
            yield event(msgspec.json.encode(self._history()), "history")
            while not self._is_draining():
                updated = self._updated  # an update while the viewer reads is for the next turn
                if self._event:
                    yield self._event
                await updated.wait()
        finally:
            self._leave()

    def _join(self) -> None:
        self._viewers += 1
        if self._poller is None:
            self._event = b""
            self._poller = asyncio.create_task(self._poll(), name="quire-view")

    def _leave(self) -> None:
        self._viewers -= 1
        if self._viewers == 0 and self._poller is not None:
            self._poller.cancel()
            self._poller = None

    def _history(self) -> History:
        return History([(point.tokens_per_second, point.ttft, point.itl) for point in self._recent.points()])

    async def _poll(self) -> None:
        maker = PictureMaker(self._llm.tokenizer, self._shows_prompts)
        while True:
            pause = PERIOD
            try:
                snapshot = await asyncio.wait_for(self._llm.snapshot(), _PATIENCE)
                self._publish("picture", self._picture(maker, snapshot))
                pause = max(PERIOD, snapshot.seconds / _MAX_COST)
            except TimeoutError:
                self._publish(
                    "problem", Problem(f"The engine has been busy with one step for more than {_PATIENCE:g} seconds.")
                )
            except EngineDeadError as error:
                self._publish("problem", Problem(f"The engine does not respond: {error.summary}"))
            except Exception as error:  # noqa: BLE001 - viewers see any failure, and it may pass
                self._publish("problem", Problem(f"The engine does not respond: {error}"))
            await asyncio.sleep(pause)

    def _picture(self, maker: PictureMaker, snapshot: EngineSnapshot) -> Picture:
        picture = maker.picture(snapshot)
        points = [point for point in self._recent.points() if point.time > self._sent_until]
        for point in points:  # usually one
            self._sent_until = point.time
            picture.ttft = picture.ttft if point.ttft is None else point.ttft
            picture.itl = picture.itl if point.itl is None else point.itl
        return picture

    def _publish(self, name: str, data: msgspec.Struct) -> None:
        self._event = event(msgspec.json.encode(data), name)
        updated, self._updated = self._updated, asyncio.Event()
        updated.set()


def view_routes(view: EngineView, stream: Callable[[AsyncGenerator[bytes, None]], Response]) -> list[Route]:
    """Return the route `GET /view/events`; `stream` makes a response of events."""

    async def events(_request: Request) -> Response:
        """Stream the engine's state. A minute of history, then a picture about four times a second, without end."""
        return stream(view.events())

    return [Operation("/view/events", events, events=[History, Picture, Problem])]


_FOLDER = Path(__file__).parents[2] / "page"


def page_routes() -> list[Route]:
    """Return the routes `GET /`, and `GET /page/...` for each file of the page."""
    files = static_files(_FOLDER)
    index = files.pop("index.html")

    async def page(request: Request) -> Response:
        """Show a chat with the model and a live view of the engine. For browsers."""
        return await index.respond(request)

    return [
        Operation("/", page, media_types=["text/html"]),
        *(Route(f"/page/{name}", file.respond, include_in_schema=False) for name, file in files.items()),
    ]
