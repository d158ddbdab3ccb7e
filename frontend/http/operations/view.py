"""The page at `/`, and its live views of the engines."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from weakref import WeakKeyDictionary

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.errors import EngineDeadError
from quire.frontend.http.documentation.operation import AnswerTypes, Operation
from quire.frontend.http.models.served_model import ServedModel
from quire.frontend.http.models.served_models import ServedModels, not_loaded
from quire.frontend.http.operations.adapter_table import AdapterTable
from quire.frontend.http.operations.changes import Change, Feed
from quire.frontend.http.operations.engine_table import EngineTable
from quire.frontend.http.operations.engines import engine_number
from quire.frontend.http.operations.pictures import Picture, PictureMaker, pause_after
from quire.frontend.http.operations.prefixes import PrefixTrees, TreePicture, shown_of
from quire.frontend.http.operations.table_feed import Updates
from quire.frontend.http.operations.tables import Tables
from quire.frontend.http.service import ModelService
from quire.frontend.http.transport.responses import json_response, static_files
from quire.frontend.http.transport.sse import DONE, EventStream, event
from quire.frontend.metrics.recent import RecentRates
from quire.protocol.messages import EngineSnapshot

PERIOD = 0.25  # seconds between two pictures
_PATIENCE = 5.0  # seconds after which a long step is reported


class History(msgspec.Struct):
    """The last minute of this server's requests: [tokens per second, TTFT, ITL] of each quarter second.

    `engines`: how many there are. Where there are several the tokens are None, since views show one engine's.
    """

    points: list[tuple[float | None, float | None, float | None]]
    engines: int


class Problem(msgspec.Struct):
    """The reason why there is no picture now."""

    message: str


class EngineView:
    """Server-sent events for any number of viewers: `history` and `picture` once, then `change` or `problem`.

    Of a set of engines it shows one; `engines` events have a table of all, and `adapters` events one of the adapters.

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
        engine: int | None = None,
        tables: Tables | None = None,
    ) -> None:
        """Observe `llm` through `recent`, its observer; `is_draining` returns whether the server is shutting down.

        `shows_prompts`: viewers may read the prompts of all. `engine`: number of one of several, None for the first
        that is there. `tables`: those that all views of the model have.
        """
        self._shows_prompts = shows_prompts
        self._llm = llm
        self._engine = engine
        self._recent = recent
        self._is_draining = is_draining
        self._feed = Feed()
        self._problem = b""  # the event, if the latest poll failed
        self._tables = tables or Tables(Updates())
        self._updates = self._tables.updates
        self._sent_until = 0.0  # time of the latest recent point that a picture included
        self._viewers = 0
        self._poller: asyncio.Task[None] | None = None
        self.trees = PrefixTrees(llm, shows_prompts, engine)

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
            feed, seen, shown, problem = self._feed, 0, list[bytes](), b""
            while not self._is_draining():
                updated = self._updates.next  # an update while the viewer reads is for the next turn
                tables = self._tables.events
                for table in tables:
                    if table and table not in shown:
                        yield table
                shown = tables
                if self._problem != problem:
                    problem = self._problem
                    if problem:
                        yield problem
                if not problem and feed.number != seen:
                    latest = feed.event_after(seen)
                    seen = feed.number
                    yield latest
                await updated.wait()
        finally:
            self._leave()

    def _join(self) -> None:
        self._viewers += 1
        self._tables.join()
        if self._poller is None:
            self._feed, self._problem = Feed(), b""
            self._poller = asyncio.create_task(self._poll(), name="quire-view")

    def _leave(self) -> None:
        self._viewers -= 1
        self._tables.leave()
        if self._viewers == 0 and self._poller is not None:
            self._poller.cancel()
            self._poller = None

    def _history(self) -> History:
        num_engines = len(self._llm.engines())
        return History(
            [
                (
                    round(point.tokens_per_second, 1) if num_engines == 1 else None,
                    _rounded(point.ttft),
                    _rounded(point.itl),
                )
                for point in self._recent.points()
            ],
            num_engines,
        )

    async def _poll(self) -> None:
        maker = PictureMaker(self._llm.tokenizer, self._shows_prompts)
        while True:
            pause = PERIOD
            try:
                snapshot = await asyncio.wait_for(self._llm.snapshot(self._engine), _PATIENCE)
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
        self._updates.notify()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _problem(message: str) -> bytes:
    return event(msgspec.json.encode(Problem(message)), "problem")


class EngineViews:
    """The views of a set of engines: of the first engine that is there, and of each by its number."""

    def __init__(self, llm: AsyncLLM, make: Callable[[int | None], EngineView]) -> None:
        """`make(engine)` returns a view of one engine of `llm`."""
        self._llm = llm
        self._make = make
        self._views: dict[int | None, EngineView] = {}

    @property
    def numbers(self) -> list[int]:
        """The numbers of the engines."""
        return [engine.number for engine in self._llm.engines()]

    def of(self, engine: int | None) -> EngineView:
        """Return the view of an engine, None for the first that is there. Of one that is not there it has a problem."""
        there = {None, *self.numbers}
        self._views = {number: view for number, view in self._views.items() if number in there or view.viewers}
        if engine not in self._views:
            self._views[engine] = self._make(engine)
        return self._views[engine]


class ViewEndpoints:
    """Handlers of the live views of the models, each of which has a view while it is loaded."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._views: WeakKeyDictionary[ModelService, EngineViews] = WeakKeyDictionary()
        self._recent: dict[ServedModel, RecentRates] = {}
        models.loader.on_open(self._note)

    async def events(self, request: Request) -> Response:
        """Stream an engine's state. A minute of history and a picture, then about four changes a second; if the model
        has several engines, also a table of them, and if it has adapters one of these. It loads no model: while it is
        not loaded, there is a problem in place of a picture.
        """
        model = self._models.asked(request)
        return EventStream(self._events(model, self._engine(request, model)), self._explain, model.metrics.http.stream)

    async def prefixes(self, request: Request) -> Response:
        """Return a part of the prefix cache as a tree. Its upper levels, and in the query `shown=ID:COUNT,ID:COUNT`
        the number of branches of any of its runs; `known` is the tag of an earlier answer, whose texts are left out.
        """
        query = request.query_params
        model, shown = self._models.asked(request), shown_of(query.get("shown", ""))
        if model.service is None:
            raise not_loaded(model)
        view = self._views[model.service].of(self._engine(request, model))
        return json_response(await view.trees.picture(shown, query.get("known", "")))

    def _engine(self, request: Request, model: ServedModel) -> int | None:
        """Return the number of the engine in the query. Raises `ApiError` 404 unless there is one, or may be later."""
        if (given := request.query_params.get("engine")) is None:
            return None
        return engine_number(given, None if model.service is None else self._views[model.service].numbers)

    def _note(self, model: ServedModel, service: ModelService) -> None:
        recent = self._recent.setdefault(model, RecentRates())
        llm = service.llm
        llm.add_observer(recent)
        known, server, tables = weakref.ref(service), self._models.server, Tables.of(model, llm)

        def has_ended() -> bool:
            return server.draining or (now := known()) is None or now.is_closed

        def make(engine: int | None) -> EngineView:
            return EngineView(llm, recent, has_ended, server.args.shows_prompts(), engine, tables)

        self._views[service] = EngineViews(llm, make)

    async def _events(self, model: ServedModel, engine: int | None) -> AsyncGenerator[bytes, None]:
        while not self._models.server.draining:
            if model.service is None:
                yield _problem(str(not_loaded(model)))
                while not model.is_loaded and not self._models.server.draining:  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(PERIOD)
            else:
                async with aclosing(self._views[model.service].of(engine).events()) as events:
                    async for each in events:
                        yield each

    def _explain(self, error: Exception) -> bytes:
        return event(msgspec.json.encode(self._models.server.api_error(error, self._models.retry_after).body)) + DONE


def view_routes(models: ServedModels) -> list[Route]:
    """Return the routes `GET /view/events` and `GET /view/prefixes`."""
    view = ViewEndpoints(models)
    kinds = AnswerTypes(events=[History, Picture, Change, Problem, EngineTable, AdapterTable], errors=[404])
    tree = AnswerTypes(TreePicture, errors=[400, 404, 503])
    return [
        Operation("/view/events", view.events, kinds, query=("model", "engine")),
        Operation("/view/prefixes", view.prefixes, tree, query=("model", "engine")),
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
