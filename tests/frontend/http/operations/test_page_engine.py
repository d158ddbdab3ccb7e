"""The full view of the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from http_server import Server

if TYPE_CHECKING:
    from playwright.sync_api import Page

INK = """selector => {
    const canvas = document.querySelector(selector);
    const { width, height } = canvas;
    return width > 0 && canvas.getContext("2d").getImageData(0, 0, width, height).data.some(Boolean);
}"""


def test_the_full_view_of_a_busy_engine(open_page: Callable[..., Page], server: Server) -> None:
    page = open_page(viewport={"width": 1600, "height": 1000})
    assert [page.inner_text(f"#engine .tile:has(#{name}) h3") for name in ("ttft", "itl")] == [
        "Server's TTFT",
        "Server's ITL",
    ]
    page.click("#toggle-full")
    assert page.is_hidden("#input")
    body = {"prompt": "Once upon a time there was a fox " * 10, "max_tokens": 700, "n": 8, "ignore_eos": True}
    is_seen = threading.Event()

    def keep_busy() -> None:
        while not is_seen.is_set():
            server.request("/v1/completions", body)

    clients = [threading.Thread(target=keep_busy) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        page.wait_for_selector("#timeline-summary:text('decoded')")
        page.wait_for_function(f"({INK})('#timeline')")
        page.wait_for_function(f"({INK})('#pages')")
        page.wait_for_selector("#batch li .what:text('decode +')")
    finally:
        is_seen.set()
        for client in clients:
            client.join()
    page.wait_for_selector("#tree .run-text:text('Once upon')")
    page.keyboard.press("Escape")
    assert page.is_visible("#input")
    assert page.is_hidden("#timeline")


def test_speculation_is_shown_once_there_is_some(open_page: Callable[..., Page]) -> None:
    page = open_page()
    page.click("#toggle-engine")
    page.wait_for_selector("#pulse.idle")
    assert page.is_hidden("#speculation")
    page.evaluate(
        """async () => {
            const { SpeculationView } = await import("/page/speculation.js");
            const view = new SpeculationView(document);
            view.add({ draft_tokens_per_second: 80, accepted_tokens_per_second: 60 });
            view.show({ stats: { draft_tokens: 8, accepted_tokens: 6 } });
        }"""
    )
    assert page.inner_text("#speculation-share") == "75 %"
    assert page.inner_text("#speculation-summary").startswith("80.0 drafted/s, 60.0 held/s; the last step drafted 8")


def test_a_sparkline_begins_with_its_first_value(open_page: Callable[..., Page]) -> None:
    """A latency that has not been measured yet is no line at zero."""
    page = open_page()
    lines = page.evaluate(
        """async () => {
            const { Line } = await import("/page/speed.js");
            const line = new Line(document.querySelector("#decode-line"));
            return [null, 8, null, 4].map((value) => {
                line.add(value);
                line.draw();
                return line.path.getAttribute("d");
            });
        }"""
    )
    assert lines == ["", "M100.00,1.00", "M99.58,1.00L100.00,1.00", "M99.16,1.00L99.58,1.00L100.00,15.00"]


def test_a_link_opens_the_full_view(open_page: Callable[..., Page]) -> None:
    page = open_page(path="/#engine", viewport={"width": 1600, "height": 1000})
    assert page.is_visible("#timeline")
    page.click("#toggle-full")
    assert page.is_visible("#input")
    assert page.evaluate("location.hash") == ""


@pytest.mark.parametrize("width", [390, 800, 1300, 3840])
def test_the_full_view_fits_every_window(open_page: Callable[..., Page], width: int) -> None:
    options: dict[str, Any] = {"viewport": {"width": width, "height": 900}}
    page = open_page(path="/#engine", **options)
    page.wait_for_function("() => /[0-9]/.test(document.querySelector('.legend dd').textContent)")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("document.querySelector('#engine').scrollWidth") <= width
