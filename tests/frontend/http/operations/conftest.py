"""The page in a browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from http_server import Server
from patience import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

LEFT = r"(/view/\S*|icon\.svg) net::ERR_ABORTED"  # expected when the page is closed


@pytest.fixture
def open_page(browser: Browser, server: Server) -> Iterator[Callable[..., Page]]:
    """Return a function that opens the page; its console must show no errors but `expected` ones."""
    contexts: list[BrowserContext] = []
    problems: list[str] = []

    def start(expected: str = "nothing", path: str = "/", **options: Any) -> Page:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE * 1000)

        def note(text: str) -> None:
            if not re.search(f"{LEFT}|{expected}", text):
                problems.append(text)

        page.on("console", lambda message: note(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: note(str(error)))
        page.on("requestfailed", lambda request: note(f"{request.url} {request.failure}"))
        page.goto(f"{server.url}{path}")
        page.wait_for_function("() => document.querySelector('#model').textContent")
        return page

    yield start
    for context in contexts:
        context.close()
    assert not problems
