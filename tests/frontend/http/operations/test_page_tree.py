"""The tree of the prefix cache in the full view of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from http_server import Server

if TYPE_CHECKING:
    from playwright.sync_api import Page

COMMON = "Once upon a time there was a fox who lived in a deep forest and ate cheese every day. " * 4
RUN = "#tree [role=treeitem]"


@pytest.fixture
def server() -> Iterator[Server]:
    """A server with nothing in its cache."""
    with Server.start() as server:
        yield server


def fill_cache(server: Server, branches: int) -> None:
    """Put a prefix with many branches into the cache, and one under a salt."""
    for number in range(branches):
        body = {"prompt": f"{COMMON}{number} crows sang. " + "The king came. " * 10, "max_tokens": 1}
        server.request("/v1/completions", body)
    server.request("/v1/completions", {"prompt": COMMON, "max_tokens": 1, "cache_salt": "mine"})


def focused(page: Page) -> tuple[str, str | None]:
    """Return the text and the level of the tree's item in focus."""
    text = page.evaluate("document.activeElement.querySelector('.run-text').textContent")
    return str(text), page.locator(":focus").get_attribute("aria-level")


def test_the_prefix_cache_is_a_tree_for_pointer_and_keyboard(open_page: Callable[..., Page], server: Server) -> None:
    fill_cache(server, 12)
    page = open_page(path="/#engine", viewport={"width": 1600, "height": 1000})
    page.wait_for_selector(f"{RUN}:has-text('more branches')")
    page.focus(f"{RUN} >> nth=0")
    assert focused(page) == ("All prompts", "1")
    page.keyboard.press("ArrowRight")
    text, level = focused(page)
    assert ("Once upon a time" in text, level) == (True, "2")
    assert "of its prompts" in page.inner_text("#tree-detail")
    assert "cheese" in page.inner_text("#tree-detail .detail-last")
    assert page.locator(f"{RUN}[aria-level='3']").count() == 8 + 1 + 1  # and others; that of the salt
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector(f"{RUN}[aria-selected=true][aria-expanded=false]")
    assert page.locator(f"{RUN}[aria-level='3']:has-text('crows')").count() == 0
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll(\"#tree [aria-level='3']\").length >= 12")
    page.keyboard.press("ArrowRight")
    assert focused(page)[1] == "3"
    page.keyboard.press("ArrowLeft")
    assert focused(page) == (text, "2")
    page.keyboard.press("End")
    assert focused(page)[0] != text
    page.keyboard.press("Home")
    assert focused(page) == ("All prompts", "1")
    assert page.locator(f"{RUN}:has-text('A cache salt')").count() == 1
    assert page.locator(f"{RUN}:has-text('hidden: it has a salt')").count() == 1
    assert page.locator(f"{RUN}[tabindex='0']").count() == 1


def test_more_branches_are_shown_on_request(open_page: Callable[..., Page], server: Server) -> None:
    fill_cache(server, 40)
    page = open_page(path="/#engine", viewport={"width": 1600, "height": 1000})
    page.click(f"{RUN}[aria-level='3']:has-text('more branches')")
    page.wait_for_function("() => document.querySelectorAll(\"#tree [aria-level='3']\").length > 30")
    places = page.locator(f"{RUN}[aria-level='3']").evaluate_all(
        "items => items.map((item) => [Number(item.ariaPosInSet), Number(item.ariaSetSize)])"
    )
    *branches, salted = sorted(places, key=lambda place: place[1], reverse=True)
    assert branches == [[position, len(branches)] for position in range(1, len(branches) + 1)]
    assert salted == [1, 1]
    before = page.locator(RUN).count()
    page.click(f"{RUN}[aria-level='2'] .run-toggle >> nth=0")
    page.wait_for_function(
        "before => document.querySelectorAll('#tree [role=treeitem]').length < before - 20", arg=before
    )


def test_an_idle_engine_is_not_asked_for_its_tree_again(open_page: Callable[..., Page], server: Server) -> None:
    fill_cache(server, 2)
    page = open_page()
    page.clock.install()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "view/prefixes" in request.url else None)
    page.goto(f"{server.url}/#engine")
    page.reload()
    page.wait_for_selector("#pulse.idle")
    page.wait_for_selector(f"{RUN} >> nth=1")
    page.clock.run_for(5_000)
    known = len(asked)
    page.clock.run_for(60_000)
    assert len(asked) == known
    server.request("/v1/completions", {"prompt": COMMON + "A crow. " * 9, "max_tokens": 1})
    page.wait_for_function("() => document.querySelector('#step-summary').textContent.includes('prefill')")
    with page.expect_request("**/view/prefixes**"):
        page.clock.run_for(5_000)
