"""The page at `/`, and its live view of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.documentation.operation import Operation
from quire.frontend.http.operations.picture import Picture, PictureMaker
from quire.frontend.http.transport.responses import static_files
from quire.frontend.http.transport.sse import event
from quire.frontend.metrics.recent import RecentRates
from quire.protocol.messages import EngineSnapshot

PERIOD = 0.25  # seconds between two pictures
_MOST_COST = 0.01  # of the engine's time; a pool that takes longer to look at is looked at less often
_PATIENCE = 5.0  # seconds until a step that goes on is told of


class History(msgspec.Struct):
    """The last minute of this server's requests: [tokens per second, TTFT, ITL] of each quarter second."""

    points: list[tuple[float, float | None, float | None]]


class Problem(msgspec.Struct):
    """Why there is no picture at the moment, in words."""

    message: str


class EngineView:
    """Server-sent events for any number of viewers: `history` once, then `picture` or `problem` again and again.

    While there are viewers one task asks the engine for a snapshot, `PERIOD` seconds after the one before or later, so
    that it costs the engine less than a hundredth of its time. A viewer that reads slowly misses pictures and nobody
    waits for it. All of it belongs to one event loop.
    """

    def __init__(self, llm: AsyncLLM, recent: RecentRates, is_draining: Callable[[], bool] = lambda: False) -> None:
        """`recent` is an observer of `llm`. `is_draining`: whether the server is to stop, and all streams with it."""
        self._llm = llm
        self._recent = recent
        self._is_draining = is_draining
        self._event = b""  # the latest, none before the first
        self._news = asyncio.Event()
        self._seen_until = 0.0  # of the recent points, the time of the last that was told
        self._viewers = 0
        self._poller: asyncio.Task[None] | None = None

    @property
    def viewers(self) -> int:
        """How many look at the moment."""
        return self._viewers

    @property
    def is_polling(self) -> bool:
        """Whether the engine is asked for snapshots."""
        return self._poller is not None

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of one viewer, until it is closed or the server drains."""
        self._join()
        try:
            yield event(msgspec.json.encode(self._history()), "history")
            while not self._is_draining():
                news = self._news  # what comes while the viewer reads is for the next turn
                if self._event:
                    yield self._event
                await news.wait()
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
        maker = PictureMaker(self._llm.tokenizer)
        while True:
            pause = PERIOD
            try:
                snapshot = await asyncio.wait_for(self._llm.snapshot(), _PATIENCE)
                self._tell("picture", self._picture(maker, snapshot))
                pause = max(PERIOD, snapshot.seconds / _MOST_COST)
            except TimeoutError:
                self._tell("problem", Problem(f"The engine is busy with one step for more than {_PATIENCE:g} seconds."))
            except Exception as error:  # noqa: BLE001 - whatever it is, those who look are told, and it may pass
                self._tell("problem", Problem(f"The engine gives no answer: {error}"))
            await asyncio.sleep(pause)

    def _picture(self, maker: PictureMaker, snapshot: EngineSnapshot) -> Picture:
        picture = maker.picture(snapshot)
        news = [point for point in self._recent.points() if point.time > self._seen_until]
        for point in news:  # most often there is one
            self._seen_until = point.time
            picture.ttft = picture.ttft if point.ttft is None else point.ttft
            picture.itl = picture.itl if point.itl is None else point.itl
        return picture

    def _tell(self, name: str, data: msgspec.Struct) -> None:
        self._event = event(msgspec.json.encode(data), name)
        news, self._news = self._news, asyncio.Event()
        news.set()


def view_routes(view: EngineView, stream: Callable[[AsyncGenerator[bytes, None]], Response]) -> list[Route]:
    """`GET /view/events`; `stream` makes an answer of events."""

    async def events(_request: Request) -> Response:
        """Tell what the engine does. First a minute of history, then a picture about four times a second, for good."""
        return stream(view.events())

    return [Operation("/view/events", events, events=[History, Picture, Problem])]


_FOLDER = Path(__file__).parents[2] / "page"


def page_routes() -> list[Route]:
    """`GET /` and `GET /page/...` for each file of the page."""
    files = static_files(_FOLDER)
    index = files.pop("index.html")

    async def page(request: Request) -> Response:
        """Show a chat with the model and the live view of the engine. In a browser."""
        return await index.answer(request)

    return [
        Operation("/", page, media_types=["text/html"]),
        *(Route(f"/page/{name}", file.answer, include_in_schema=False) for name, file in files.items()),
    ]
