"""The page in a real browser, with a real server."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from http_server import Server
from page_driver import ANSWER, choose, last_answer, say, wait_for_answers
from patience import PATIENCE

from quire.frontend import LLM

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDE: dict[str, Any] = {"viewport": {"width": 1600, "height": 900}}  # where the engine is shown beside the chat
TALE = "Tell me a tale about a fox and a crow"


def eventually(condition: Callable[[], bool]) -> None:
    """Poll a condition; each call takes a while, such as a round trip to the engine."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline


def test_a_long_time_is_in_seconds(open_page: Callable[..., Page]) -> None:
    shown = open_page().evaluate(
        """async () => {
            const { duration } = await import("/page/numbers.js");
            return [41.4, 999.4, 999.6, 57230].map(duration);
        }"""
    )
    assert shown == ["41 ms", "999 ms", "1.0 s", "57.2 s"]


def test_an_answer_is_streamed_with_its_figures(open_page: Callable[..., Page]) -> None:
    page = open_page()
    assert page.evaluate("document.activeElement.id") == "input"
    choose(page, max_tokens=40, seed=1)
    page.fill("#input", TALE)
    page.press("#input", "Shift+Enter")
    assert page.input_value("#input") == f"{TALE}\n"
    page.press("#input", "Enter")
    wait_for_answers(page)
    assert len(last_answer(page)) > 40
    figures = page.inner_text(f"{ANSWER} .figures")
    time_to_first = r"TTFT in this browser (\d{1,3} ms|\d+\.\d s)"
    assert re.fullmatch(rf"40 tokens( · [\d.]+ tok/s)? · {time_to_first} · token limit reached", figures)
    say(page, "Go on")
    wait_for_answers(page, 2)


def test_settings_survive_a_reload(open_page: Callable[..., Page]) -> None:
    page = open_page()
    choose(page, temperature=0.4, system="You tell old tales.", tint=True)
    page.reload()
    assert page.input_value("[name=temperature]") == "0.4"
    assert page.input_value("[name=system]") == "You tell old tales."
    assert page.is_checked("[name=tint]")
    assert page.inner_text("#settings-set") == "3 of your own"


@pytest.mark.parametrize("how", ["document.querySelector('#stop').click()", "document.dispatchEvent(escape)"])
def test_an_answer_is_stopped(open_page: Callable[..., Page], server: Server, how: str) -> None:
    page = open_page(expected="v1/chat/completions net::ERR_ABORTED")
    choose(page, max_tokens=1900, temperature=5, seed=2, logprobs=True)  # a long answer, unless stopped
    page.evaluate(
        f"""() => {{
            const escape = new KeyboardEvent("keydown", {{ key: "Escape" }});
            const observer = new MutationObserver(() => {{
                if (document.querySelectorAll(".token").length < 5) return;
                observer.disconnect();
                {how};
            }});
            observer.observe(document.querySelector("#log"), {{ childList: true, subtree: true }});
        }}"""
    )
    say(page, TALE)
    wait_for_answers(page)
    assert "stopped" in page.inner_text(f"{ANSWER} .figures")
    assert page.locator(".token").count() < 1900
    with LLM(engine_address=server.engine_address) as llm:
        eventually(lambda: llm.stats()["running"] == 0)


def test_an_answer_can_be_regenerated_and_a_message_edited(open_page: Callable[..., Page]) -> None:
    page = open_page()
    choose(page, max_tokens=20, seed=5)
    say(page, TALE)
    wait_for_answers(page)
    first = last_answer(page)
    page.evaluate("document.querySelector('.message.assistant').id = 'old'")
    page.click("text=Regenerate")
    page.wait_for_selector("#old", state="detached")
    wait_for_answers(page)
    assert last_answer(page) == first  # the seed is the same
    page.click(".message >> text=Edit")
    assert page.input_value("#input") == TALE
    page.keyboard.press("Escape")
    assert page.input_value("#input") == ""
    page.click(".message >> text=Edit")
    say(page, "Tell me of <img src=x> & two kings")
    wait_for_answers(page)
    assert page.locator(".message").count() == 2
    assert page.inner_text(".message.user .text") == "Tell me of <img src=x> & two kings"
    assert page.locator(".log img").count() == 0
    page.click("#new")
    assert page.locator(".message").count() == 0


@pytest.mark.parametrize("mode", ["chat", "continue"])
def test_probabilities_are_shown_on_hover_and_by_keyboard(open_page: Callable[..., Page], mode: str) -> None:
    page = open_page()
    choose(page, mode=mode, max_tokens=12, logprobs=True)
    say(page, "Once upon a time there was a king who")
    wait_for_answers(page)
    page.hover(".token >> nth=3")
    assert page.locator("#tooltip .row").count() >= 5
    assert page.locator("#tooltip .row.chosen").count() == 1
    shares = [float(text.strip("<% ")) for text in page.locator("#tooltip .row span:last-child").all_inner_texts()]
    assert 0 < sum(shares) <= 100.5
    page.hover("#input")
    page.wait_for_selector("#tooltip", state="hidden")
    page.focus(f"{ANSWER} .tokens")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("[...document.querySelectorAll('.token')].indexOf(document.activeElement)") == 1
    assert page.is_visible("#tooltip")
    page.click("text=Formatted")
    assert page.is_hidden(".token >> nth=0")
    assert last_answer(page)


def test_the_page_map_changes_during_an_answer(open_page: Callable[..., Page], server: Server) -> None:
    page = open_page(**WIDE)
    picture = "document.querySelector('#pages').toDataURL()"
    held = "document.querySelectorAll('.legend dd')[1].textContent"
    page.wait_for_function("() => /[0-9]/.test(document.querySelector('.legend dd').textContent)")
    before = page.evaluate(picture)
    body = {"prompt": "Once", "max_tokens": 1900, "n": 2, "ignore_eos": True}
    answers = threading.Thread(target=server.request, args=("/v1/completions", body))
    answers.start()
    try:
        page.wait_for_function(f"() => {held} !== '0'")
        page.wait_for_function(f"before => {picture} !== before", arg=before)
        page.wait_for_selector("#batch li .what:text('decode +1')")
        page.wait_for_function("() => parseFloat(document.querySelector('#decode-rate').textContent) > 0")
    finally:
        answers.join()
    page.wait_for_function(f"() => {held} === '0'")


@pytest.mark.parametrize("way", ["panel", "window"])
def test_a_hidden_view_is_not_connected(open_page: Callable[..., Page], way: str) -> None:
    page = open_page(**WIDE)
    hide = "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true}); "
    hide += "document.dispatchEvent(new Event('visibilitychange')); }"

    def see(is_seen: bool) -> None:
        if way == "panel":
            page.click("#toggle-engine")
            assert page.is_visible("#engine") == is_seen
        else:
            page.evaluate(hide, not is_seen)

    page.wait_for_selector("#pulse.idle")
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/view/events")):
        see(False)
    assert page.get_attribute("#pulse", "class") == "pulse"
    see(True)
    page.wait_for_selector("#pulse.idle")


def test_errors_are_shown_and_a_retry_works(open_page: Callable[..., Page]) -> None:
    page = open_page(expected="400")
    choose(page, max_tokens=100_000)
    say(page, TALE)
    wait_for_answers(page)
    assert "max_tokens" in page.inner_text(".error")
    choose(page, max_tokens=5)
    page.click("text=Try again")
    page.wait_for_selector(".error", state="detached")
    wait_for_answers(page)
    assert last_answer(page)


def test_the_page_asks_for_a_key_and_sends_it(open_page: Callable[..., Page]) -> None:
    page = open_page(expected="401")
    keys: list[str | None] = []

    def refuse(route: Any) -> None:
        keys.append(route.request.headers.get("authorization"))
        if keys[-1] == "Bearer secret":
            route.continue_()
        else:
            route.fulfill(status=401, body="{}")

    page.route("**/v1/models", refuse)
    page.reload()
    page.wait_for_selector("#key:visible")
    page.fill("#key", "secret")
    page.press("#key", "Enter")
    page.wait_for_selector("#key", state="hidden")
    page.wait_for_selector("#model:text('quire-demo')")
    assert keys == [None, "Bearer secret"]


def test_a_browser_with_basic_authentication_needs_no_further_key(browser: Browser, server: Server) -> None:
    """The browser sends its credentials with every request; and a stopping server does not wait for viewers."""
    with Server.start("--engine-address", server.engine_address, "--api-key", "secret") as guarded:
        context = browser.new_context(http_credentials={"username": "any", "password": "secret"}, **WIDE)
        page = context.new_page()
        page.goto(f"{guarded.url}/")
        choose(page, max_tokens=5)
        say(page, TALE)
        wait_for_answers(page)
        assert last_answer(page)
        page.wait_for_selector("#pulse.idle")
        guarded.stop()
        page.wait_for_selector("#engine-note.bad:text('The server closed the view')")
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_every_width_and_colour_scheme(open_page: Callable[..., Page], scheme: str, width: int) -> None:
    page = open_page(color_scheme=scheme, viewport={"width": width, "height": 740}, reduced_motion="reduce")
    choose(page, max_tokens=10)
    say(page, "word" * 200)
    wait_for_answers(page)
    if width == 360:
        page.click("#toggle-settings")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.click("#toggle-engine")
        page.wait_for_function("() => /[0-9]/.test(document.querySelector('.legend dd').textContent)")
        assert page.is_hidden("#input")
        assert page.evaluate("document.querySelector('#engine').scrollWidth") == width
    assert page.evaluate("document.documentElement.scrollWidth") == width
    background = "getComputedStyle(document.body).backgroundColor"
    first = page.evaluate(background)
    assert (first == "rgb(250, 249, 246)") == (scheme == "light")
    page.click("#toggle-theme")
    other = page.evaluate(background)
    assert other != first
    page.reload()
    assert page.evaluate(background) == other
