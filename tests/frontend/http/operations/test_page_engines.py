"""The page of a server with several engines: the set, each engine in detail, and an answer's way through them."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from http_server import Server
from page_driver import ANSWER, choose, say, wait_for_answers

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDE: dict[str, Any] = {"viewport": {"width": 1600, "height": 1000}}  # where the engine is shown beside the chat
ROWS = "#engines tbody tr"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server of two engines, in whose place the page's other tests have a server of one."""
    options = ("--data-parallel-size", "2", "--threads", "1", "--num-pages", "128", "--router", "round-robin")
    with Server.start(*options) as server:
        yield server


def engine_of(server: Server, prompt: str) -> int:
    """Return the engine that answers a request."""
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "return_route": True}
    [hop] = server.request("/v1/completions", body).json()["choices"][0]["route"]["hops"]
    return int(hop["engine"])


def test_the_set_is_a_table(open_page: Callable[..., Page], server: Server) -> None:
    page = open_page(**WIDE)
    page.wait_for_function("selector => document.querySelectorAll(selector).length === 2", arg=ROWS)
    assert page.inner_text("#engines-router") == "round-robin"
    table = page.get_by_role("table", name="Engines round-robin")
    assert table.get_by_role("columnheader").all_inner_texts() == [
        "No.", "State", "Run", "Wait", "KV", "tok/s", "Own", "Lost",
    ]  # fmt: skip
    page.wait_for_function("selector => !document.querySelector(selector).textContent.includes('\\u2013')", arg=ROWS)
    row = table.get_by_role("row").nth(1)
    assert row.get_by_role("rowheader").inner_text() == "0"
    assert row.get_by_role("cell").all_inner_texts() == ["ready", "0", "0", "0 %", "0", "0", "0"]


def test_the_user_chooses_the_engine_to_see(open_page: Callable[..., Page], server: Server) -> None:
    texts = {engine_of(server, f"{text} " * 20): text for text in ("There was a fox.", "A crow sat there.")}
    assert set(texts) == {0, 1}
    page = open_page(path="/#engine", **WIDE)
    first, second = (page.locator(f"{ROWS}[data-engine='{number}']") for number in (0, 1))
    first.get_by_role("button", name="Engine 0", pressed=True).wait_for()
    page.wait_for_selector(f"#tree .run-text:text('{texts[0]}')")
    with page.expect_request(lambda request: request.url.endswith("/view/events?engine=1")):
        second.get_by_role("button").press("Enter")
    assert second.get_by_role("button", name="Engine 1", pressed=True).count() == 1
    assert page.inner_text("#engine-number") == "1"
    page.wait_for_selector(f"#tree .run-text:text('{texts[1]}')")
    assert page.locator(f"#tree .run-text:text('{texts[0]}')").count() == 0
    first.locator(".rate").click()
    page.wait_for_selector(f"#tree .run-text:text('{texts[0]}')")
    assert second.get_by_role("button", pressed=False).count() == 1


def test_an_unknown_engine_is_not_found(server: Server) -> None:
    for path in ("/view/events", "/view/prefixes"):
        for given in ("2", "-1", "x", "9" * 20, ""):
            reply = server.request(f"{path}?engine={given}")
            assert (reply.status, reply.error["code"]) == (404, "engine_not_found"), path
            assert reply.error["message"] == f"there is no engine '{given}'; the engines are 0, 1"


def test_an_engine_that_has_left_is_not_shown_any_more(open_page: Callable[..., Page]) -> None:
    """The page shows the first engine instead."""
    options = ("--data-parallel-size", "3", "--threads", "1", "--num-pages", "64")
    with Server.start(*options) as larger:
        page = open_page(**WIDE)
        page.goto(larger.url)
        third = page.locator(f"{ROWS}[data-engine='2']")
        third.get_by_role("button").click()
        page.wait_for_selector("#pulse.idle")
        larger.request("/engines/2/remove", {"drain_timeout": 0})
        third.wait_for(state="detached")
        page.wait_for_selector(f"{ROWS}[data-engine='0'].shown")
        page.wait_for_selector("#pulse.idle")
        larger.request("/engines/1/remove", {"drain_timeout": 0})
        page.wait_for_selector("#engines", state="hidden")
        page.context.close()


def test_an_answer_shows_its_engine(open_page: Callable[..., Page]) -> None:
    page = open_page()
    choose(page, max_tokens=4)
    say(page, "Tell me a tale")
    wait_for_answers(page)
    figures = page.inner_text(f"{ANSWER} .figures")
    assert re.search(r" · engine [01] \(its turn\) · token limit reached$", figures)


@pytest.mark.parametrize(
    ("route", "shown"),
    [
        ([(0, "turn", "")], ""),
        ([(0, "turn", "lost"), (0, "turn", "")], "engine 0 was lost, then engine 0"),
        (
            [(0, "prefix", "lost"), (1, "load", "moved"), (2, "session", "")],
            "engine 0 (has the prefix) was lost, then engine 1 (least load) ended, then engine 2 (has the session)",
        ),
    ],
)
def test_an_answers_way_in_words(open_page: Callable[..., Page], route: list[tuple[int, str, str]], shown: str) -> None:
    hops = [{"engine": engine, "reason": reason, "left": left} for engine, reason, left in route]
    words = open_page().evaluate(
        """async (route) => (await import("/page/route.js")).routeText(route)""",
        {"engines": 1, "router": "prefix-affinity", "hops": hops},
    )
    assert words == shown


def test_a_kept_answer_has_its_way(open_page: Callable[..., Page]) -> None:
    """The page keeps it with the conversation."""
    route = {"engines": 2, "router": "round-robin", "hops": [
        {"engine": 1, "reason": "turn", "left": "lost"}, {"engine": 0, "reason": "turn", "left": ""},
    ]}  # fmt: skip
    choices = [{"index": 0, "delta": {"content": "Yes."}, "finish_reason": "stop", "route": route}]
    body = f"data: {json.dumps({'choices': choices})}\n\ndata: [DONE]\n\n"
    page = open_page()
    page.route("**/v1/chat/completions", lambda each: each.fulfill(content_type="text/event-stream", body=body))
    say(page, "Is it?")
    wait_for_answers(page)
    way = "engine 1 (its turn) was lost, then engine 0 (its turn)"
    assert page.inner_text(f"{ANSWER} .figures").endswith(way)
    page.wait_for_function("() => document.title.startsWith('Is it?')")
    page.reload()
    page.wait_for_selector(f"{ANSWER} .figures:text('{way}')")


def test_the_table_changes_as_the_set_does(open_page: Callable[..., Page], server: Server) -> None:
    """It comes last, since no engine takes requests again."""
    page = open_page(**WIDE)
    page.wait_for_selector(f"{ROWS}[data-engine='1'] .state:text('ready')")
    os.kill(server.request("/engines").json()["engines"][0]["pid"], signal.SIGKILL)
    page.wait_for_selector(f"{ROWS}[data-engine='0'] .losses:text('1')")
    page.wait_for_selector(f"{ROWS}[data-engine='0'] .state:text('ready')")
    assert server.request("/engines/1/drain", {}).status == 200
    page.wait_for_selector(f"{ROWS}[data-engine='1'] .state:text('draining')")
