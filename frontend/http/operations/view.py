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
from quire.frontend.errors import EngineDeadError
from quire.frontend.http.documentation.operation import AnswerTypes, Operation
from quire.frontend.http.operations.changes import Change, Feed
from quire.frontend.http.operations.pictures import Picture, PictureMaker, pause_after
from quire.frontend.http.operations.prefixes import PrefixTrees, TreePicture, shown_of
from quire.frontend.http.transport.responses import json_response, static_files
from quire.frontend.http.transport.sse import event
from quire.frontend.metrics.recent import RecentRates
from quire.protocol.messages import EngineSnapshot

PERIOD = 0.25  # seconds between two pictures
_PATIENCE = 5.0  # seconds after which a long step is reported


class History(msgspec.Struct):
    """The last minute of this server's requests: [tokens per second, TTFT, ITL] of each quarter second."""

    points: list[tuple[float, float | None, float | None]]


class Problem(msgspec.Struct):
    """The reason why there is no picture now."""

    message: str


class EngineView:
    """Server-sent events for any number of viewers: `history` and `picture` once, then `change` or `problem`.

    While there are viewers, one task polls the engine for snapshots, every `PERIOD` seconds or less often, so that they
    take less than a hundredth of the engine's time. A viewer that reads slowly skips changes, gets a whole picture
    instead, and delays no other. All methods run on one event loop.
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
        self._feed = Feed()
        self._problem = b""  # the event, if the latest poll failed
        self._updated = asyncio.Event()
        self._sent_until = 0.0  # time of the latest recent point that a picture included
        self._viewers = 0
        self._poller: asyncio.Task[None] | None = None
        self.trees = PrefixTrees(llm, shows_prompts)

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
            feed, seen = self._feed, 0
            while not self._is_draining():
                updated = self._updated  # an update while the viewer reads is for the next turn
                if self._problem:
                    yield self._problem
                elif feed.number:
                    latest = feed.event_after(seen)
                    seen = feed.number
                    yield latest
                await updated.wait()
        finally:
            self._leave()

    def _join(self) -> None:
        self._viewers += 1
        if self._poller is None:
            self._feed, self._problem = Feed(), b""
            self._poller = asyncio.create_task(self._poll(), name="quire-view")

    def _leave(self) -> None:
        self._viewers -= 1
        if self._viewers == 0 and self._poller is not None:
            self._poller.cancel()
            self._poller = None

    def _history(self) -> History:
        return History(
            [
                (round(point.tokens_per_second, 1), _rounded(point.ttft), _rounded(point.itl))
                for point in self._recent.points()
            ]
        )

    async def _poll(self) -> None:
        maker = PictureMaker(self._llm.tokenizer, self._shows_prompts)
        while True:
            pause = PERIOD
            try:
                snapshot = await asyncio.wait_for(self._llm.snapshot(), _PATIENCE)
                self._feed.publish(self._picture(maker, snapshot))
                self._publish(b"")
                pause = max(PERIOD, pause_after(snapshot.seconds))
            except TimeoutError:
                self._publish(_problem(f"The engine has been busy with one step for more than {_PATIENCE:g} seconds."))
            except EngineDeadError as error:
                self._publish(_problem(f"The engine does not respond: {error.summary}"))
            except Exception as error:  # noqa: BLE001 - viewers see any failure, and it may pass
                self._publish(_problem(f"The engine does not respond: {error}"))
            await asyncio.sleep(pause)

    def _picture(self, maker: PictureMaker, snapshot: EngineSnapshot) -> Picture:
        picture = maker.picture(snapshot)
        points = [point for point in self._recent.points() if point.time > self._sent_until]
        for point in points:  # usually one
            self._sent_until = point.time
            picture.ttft = picture.ttft if point.ttft is None else _rounded(point.ttft)
            picture.itl = picture.itl if point.itl is None else _rounded(point.itl)
        return picture

    def _publish(self, problem: bytes) -> None:
        self._problem = problem
        updated, self._updated = self._updated, asyncio.Event()
        updated.set()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _problem(message: str) -> bytes:
    return event(msgspec.json.encode(Problem(message)), "problem")


def view_routes(view: EngineView, stream: Callable[[AsyncGenerator[bytes, None]], Response]) -> list[Route]:
    """Return the routes `GET /view/events` and `GET /view/prefixes`; `stream` makes a response of events."""

    async def events(_request: Request) -> Response:
        """Stream the engine's state. A minute of history and a picture, then about four changes a second."""
        return stream(view.events())

    async def prefixes(request: Request) -> Response:
        """Return a part of the prefix cache as a tree. Its upper levels, and in the query `shown=ID:COUNT,ID:COUNT`
        the number of branches of any of its runs; `known` is the tag of an earlier answer, whose texts are left out.
        """
        query = request.query_params
        return json_response(await view.trees.picture(shown_of(query.get("shown", "")), query.get("known", "")))

    return [
        Operation("/view/events", events, AnswerTypes(events=[History, Picture, Change, Problem])),
        Operation("/view/prefixes", prefixes, AnswerTypes(TreePicture, errors=[400, 503])),
    ]


_FOLDER = Path(__file__).parents[2] / "page"


def page_routes() -> list[Route]:
    """Return the routes `GET /`, and `GET /page/...` for each file of the page."""
    files = static_files(_FOLDER)
    index = files.pop("index.html")

    async def page(request: Request) -> Response:
        """Show a chat with the model and a live view of the engine. For browsers."""
        return await index.respond(request)

    return [
        Operation("/", page, AnswerTypes(media_types=["text/html"])),
        *(Route(f"/page/{name}", file.respond, include_in_schema=False) for name, file in files.items()),
    ]
