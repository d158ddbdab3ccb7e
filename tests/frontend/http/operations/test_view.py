"""The live view's events, and the files of the page."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from engine_mirror import changed
from patience import PATIENCE
from starlette.applications import Starlette
from starlette.testclient import TestClient

from quire.frontend import AsyncLLM, SamplingParams
from quire.frontend.http.args import ServerArgs
from quire.frontend.http.operations.pictures import PictureMaker
from quire.frontend.http.operations.view import EngineView, page_routes
from quire.frontend.metrics.recent import RecentRates
from quire.frontend.text.tokenizer import Tokenizer
from quire.protocol.messages import EngineSnapshot, HotPrefix, PageMap, SchedulerStats

PAGE = Path(__file__).parents[4] / "frontend" / "page"


Test = Callable[[AsyncLLM], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(num_pages=64, start_timeout=PATIENCE)
    yield llm
    llm.close()


def with_engine(test: Test) -> Callable[[AsyncLLM], None]:
    """Run a test on an event loop of its own."""

    def run(engine: AsyncLLM) -> None:
        asyncio.run(asyncio.wait_for(test(engine), PATIENCE))

    return run


async def next_event(events: AsyncIterator[bytes]) -> tuple[str, Any]:
    match = re.fullmatch(r"event: (\w+)\ndata: (.*)\n\n", (await anext(events)).decode())
    assert match
    return match[1], json.loads(match[2])


@with_engine
async def test_a_viewer_gets_the_history_a_picture_and_then_changes(llm: AsyncLLM) -> None:
    recent = RecentRates()
    llm.add_observer(recent)
    view = EngineView(llm, recent)
    async with aclosing(view.events()) as events:
        kind, history = await next_event(events)
        assert (kind, len(history["points"])) == ("history", 240)
        kind, first = await next_event(events)
        assert kind == "picture"
        assert sum(first["pages"]["num_pages"]) == 64
        async for _ in llm.generate("Once upon a time", SamplingParams(max_tokens=50, ignore_eos=True)):
            pass
        second = first
        latencies: set[str] = set()
        while second["stats"]["step"] < first["stats"]["step"] + 50 or latencies != {"ttft", "itl"}:
            kind, change = await next_event(events)
            assert kind == "change"
            second = changed(second, change)
            latencies |= {name for name in ("ttft", "itl") if second[name] is not None}
        [[_, in_prefill, count, *_]] = second["batch"]
        assert (in_prefill, count) == (False, 1)
        assert second["pages"]["num_pages"][3] > first["pages"]["num_pages"][3]
        async with aclosing(view.events()) as later:
            assert (await next_event(later))[0] == "history"
            kind, whole = await next_event(later)
            assert (kind, set(whole)) == ("picture", set(first))


@with_engine
async def test_viewers_share_one_poller_that_ends_with_the_last_of_them(llm: AsyncLLM) -> None:
    view = EngineView(llm, RecentRates())
    one, two = view.events(), view.events()
    assert not view.is_polling
    for events in (one, two):
        await next_event(events)
    assert (view.viewers, view.is_polling) == (2, True)
    pictures = await asyncio.gather(next_event(one), next_event(two))
    assert pictures[0] == pictures[1]
    await one.aclose()
    assert (view.viewers, view.is_polling) == (1, True)
    await two.aclose()
    assert (view.viewers, view.is_polling) == (0, False)
    async with aclosing(view.events()) as again:
        await next_event(again)
        assert (await next_event(again))[0] == "picture"
    assert not view.is_polling


@with_engine
async def test_a_server_that_drains_ends_the_streams(llm: AsyncLLM) -> None:
    draining = False
    view = EngineView(llm, RecentRates(), is_draining=lambda: draining)
    events = view.events()
    await next_event(events)
    await next_event(events)
    draining = True
    assert await anext(events, b"the end") == b"the end"
    assert not view.is_polling


@with_engine
async def test_an_engine_that_does_not_respond_is_a_problem_event(llm: AsyncLLM) -> None:
    other = AsyncLLM(engine_address=llm.engine_address)
    async with aclosing(EngineView(other, RecentRates()).events()) as events:
        await next_event(events)
        await asyncio.to_thread(other.close)
        kind, data = await next_event(events)
        while kind != "problem":
            kind, data = await next_event(events)
        assert data["message"].startswith("The engine does not respond: ")


def snapshot(timestamp: float, prefill: int, decode: int, prefixes: list[HotPrefix]) -> EngineSnapshot:
    pages = PageMap(32, [1, 0, 0, 0, 0], 1, b"\0")
    return EngineSnapshot(timestamp, SchedulerStats(), [], 0, [], 0, pages, prefixes, prefill, decode)


def test_rates_cover_the_time_since_the_previous_picture() -> None:
    maker = PictureMaker(None)
    first = maker.picture(snapshot(10.0, 500, 100, []))
    second = maker.picture(snapshot(10.5, 700, 110, []))
    assert (first.prefill_tokens_per_second, first.decode_tokens_per_second) == (0, 0)
    assert (second.prefill_tokens_per_second, second.decode_tokens_per_second) == (400, 20)


def test_prefixes_are_shown_as_text(demo_model: Path) -> None:
    tokenizer = Tokenizer(demo_model)
    tokens = tokenizer.encode("Once upon a time")
    prefixes = [HotPrefix(3, 1, 2, False, tokens), HotPrefix(2, 4, 1, True)]
    [one, other] = PictureMaker(tokenizer).picture(snapshot(0.0, 0, 0, prefixes)).prefixes
    assert (one.hits, one.first, one.last) == (3, tokenizer.decode(tokens, skip_special_tokens=False), "")
    assert (other.is_salted, other.first, other.last) == (True, "", "")
    assert PictureMaker(None).picture(snapshot(0.0, 0, 0, prefixes)).prefixes[0].first == " ".join(map(str, tokens))
    [hidden, _] = PictureMaker(tokenizer, shows_prompts=False).picture(snapshot(0.0, 0, 0, prefixes)).prefixes
    assert (hidden.hits, hidden.first, hidden.last) == (3, "", "")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, True),
        ({"uds": "/tmp/quire.sock", "host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "0.0.0.0", "api_key": ("one",)}, True),
        ({"api_key": ("one", "two")}, False),
    ],
)
def test_prompts_are_shown_to_one_party_only(options: dict[str, Any], shown: bool) -> None:
    assert ServerArgs(**options).shows_prompts() is shown


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(Starlette(routes=page_routes()))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page/page.css", "text/css; charset=utf-8"),
        ("/page/main.js", "text/javascript; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
        ("/page/vendor/markdown-it/markdown-it.esm.min.mjs", "text/javascript; charset=utf-8"),
        ("/page/vendor/katex/fonts/KaTeX_Main-Regular.woff2", "font/woff2"),
    ],
)
def test_the_files_of_the_page(client: TestClient, path: str, kind: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.headers["Content-Type"]) == (200, kind)
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in answer.headers["Content-Security-Policy"]
    again = client.get(path, headers={"If-None-Match": f'"other", W/{answer.headers["ETag"]}'})
    assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", answer.headers["ETag"])
    assert client.get(path, headers={"If-None-Match": '"other"'}).content == answer.content


def test_other_files_are_not_served(client: TestClient) -> None:
    for path in (
        "/page/",
        "/page/index.html",
        "/page/../page.py",
        "/page/%2e%2e/http/page.py",
        "/page/vendor/README.md",
    ):
        assert client.get(path).status_code == 404


def test_the_page_loads_nothing_from_other_origins(client: TestClient) -> None:
    """It has no URL of another host and nothing inline, and every file that it names exists.

    For libraries, which name URLs in comments and messages, the content security policy sees to it.
    """
    names = {path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*")}
    for path in filter(Path.is_file, PAGE.iterdir()):
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*|\s// .*", "", text, flags=re.MULTILINE)
        assert set(re.findall(r'(?:from |import |import\()"\./([^"]+)"', text)) <= names
        if path.suffix == ".html":
            assert set(re.findall(r'"page/([^"]+)"', text)) <= names
            assert not re.search(r"<style|style=|<script>|\son\w+=", text)
