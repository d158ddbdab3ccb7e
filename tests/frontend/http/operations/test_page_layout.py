"""What the page shows where: panels that have room, notices that cover nothing, colours that can be told apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from page_driver import answer_with, say, wait_for_answers

if TYPE_CHECKING:
    from playwright.sync_api import Page

HIT = "() => { const { x, y, width, height } = document.querySelector('#send').getBoundingClientRect(); "
HIT += "return document.elementFromPoint(x + width / 2, y + height / 2).id; }"
ABOVE = """() => {
    const box = (selector) => document.querySelector(selector).getBoundingClientRect();
    return box("#toast").height > 0 && box("#toast").bottom <= box("#form").top;
}"""
AT_END = "() => (({ scrollHeight, scrollTop, clientHeight }) => scrollHeight - scrollTop - clientHeight < 2)"
AT_END += "(document.querySelector('#log'))"
LUMINANCE = """names => {
    const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const probe = document.body.appendChild(document.createElement("i"));
    return names.map((name) => {
        probe.style.backgroundColor = `var(--${name})`;
        const channels = getComputedStyle(probe).backgroundColor.match(/[0-9]+/g).map((byte) => linear(byte / 255));
        return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2];
    });
}"""

SIZES = "() => [...new Set([...document.querySelectorAll('input:not([type=checkbox], [type=file]), select, textarea')]"
SIZES += ".map((field) => parseFloat(getComputedStyle(field).fontSize)))]"


def size(page: Page, width: int, height: int = 800) -> None:
    page.set_viewport_size({"width": width, "height": height})


def point_at_conversation(page: Page) -> None:
    """Have a conversation, and show what can be done with it in the library."""
    answer_with(page, "Yes.")
    say(page, "One")
    wait_for_answers(page)
    if page.is_hidden("#library"):
        page.click("#toggle-library")
    page.hover("#conversations li[data-id]")


@pytest.mark.parametrize("width", [390, 820, 1280])
@pytest.mark.parametrize("has_settings", [False, True])
def test_a_notice_does_not_cover_the_message_field(
    open_page: Callable[..., Page], width: int, has_settings: bool
) -> None:
    page = open_page(viewport={"width": width, "height": 800})
    point_at_conversation(page)
    page.click("#conversations [data-action=delete]")
    page.wait_for_selector("#toast:has-text('Deleted')")
    if width < 1280:
        page.click("#toggle-library")
    if has_settings:
        page.click("#toggle-settings")
    assert page.evaluate(HIT) == "send"
    page.wait_for_function(ABOVE)  # it moves in the frame after the settings have opened
    page.click("#toast >> text=Undo")
    page.wait_for_selector("#toast", state="hidden")


@pytest.mark.parametrize("width", [390, 820, 1024, 1280, 1439, 1440])
def test_the_engine_is_open_by_default_where_the_chat_keeps_its_width(
    open_page: Callable[..., Page], width: int
) -> None:
    page = open_page(viewport={"width": width, "height": 800})
    assert page.is_visible("#engine") == (width >= 1440)
    assert page.get_attribute("#toggle-engine", "aria-expanded") == str(width >= 1440).lower()


def test_panels_leave_the_chat_when_the_window_narrows(open_page: Callable[..., Page]) -> None:
    page = open_page(viewport={"width": 1600, "height": 800})
    assert page.is_visible("#library")
    assert page.is_visible("#engine")
    size(page, 1000)
    page.wait_for_selector("#library", state="hidden")
    page.wait_for_selector("#engine", state="hidden")
    size(page, 600)
    page.click("#toggle-engine")
    assert page.is_hidden("#input")
    size(page, 1600)
    page.wait_for_selector("#input")
    page.wait_for_selector("#library")
    page.wait_for_selector("#engine")
    page.click("#toggle-engine")
    page.click("#toggle-engine")
    size(page, 1000)
    page.wait_for_selector("#library", state="hidden")
    assert page.is_visible("#engine"), "the user has opened it, and it lies beside the chat"
    size(page, 600)
    page.wait_for_selector("#engine", state="hidden")
    assert page.evaluate(HIT) == "send"
    size(page, 1600)
    page.wait_for_selector("#library")
    page.wait_for_selector("#engine")
    page.click("#toggle-engine")
    page.click("#toggle-library")
    size(page, 600)
    size(page, 1600)
    page.wait_for_function("() => innerWidth === 1600")
    assert page.is_hidden("#library")
    assert page.is_hidden("#engine")


def test_the_full_view_stays_when_the_window_narrows(open_page: Callable[..., Page]) -> None:
    page = open_page(path="/#engine", viewport={"width": 1600, "height": 800})
    size(page, 600)
    page.wait_for_selector("#library", state="hidden")
    assert page.is_visible("#timeline")


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 800)])
def test_settings_have_room(open_page: Callable[..., Page], width: int, height: int) -> None:
    page = open_page(viewport={"width": width, "height": height})
    page.click("#toggle-settings")
    hidden = page.evaluate(
        "(({ scrollHeight, clientHeight }) => scrollHeight - clientHeight)(document.querySelector('#settings'))"
    )
    assert hidden == 0
    size(page, width, 400)
    box = page.locator("#settings").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= 400
    page.focus("[name=temperature]")
    page.keyboard.press("Escape")
    assert page.is_hidden("#settings")
    assert page.evaluate("document.activeElement.id") == "toggle-settings"


@pytest.mark.parametrize(
    "options", [{"viewport": {"width": 390, "height": 800}}, {"is_mobile": True, "has_touch": True}]
)
def test_phones_do_not_zoom_into_fields(open_page: Callable[..., Page], options: dict[str, Any]) -> None:
    """They do so where a text is smaller than 16 pixels, and do not zoom out again."""
    page = open_page(**options)
    point_at_conversation(page)
    page.click("#conversations [data-action=rename]")
    page.wait_for_selector("#conversations input")
    assert page.evaluate(SIZES) == [16]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_of_pages_and_steps_can_be_told_apart(open_page: Callable[..., Page], scheme: str) -> None:
    """By their luminance alone, for those who see no hues."""
    page = open_page(color_scheme=scheme)
    for names in (
        ["free", "cached", "held", "shared"],
        ["surface", "prefill", "accent"],
        ["free", "prefill", "accent"],
    ):
        shades = dict(zip(names, page.evaluate(LUMINANCE, names), strict=True))
        for one, other in itertools.combinations(names, 2):
            dark, light = sorted([shades[one], shades[other]])
            assert (light + 0.05) / (dark + 0.05) >= 1.5, (one, other)


@pytest.mark.parametrize(
    "answer", ["\n\n".join("A line.\n\n```\ncode\n```" for _ in range(9)), [{"content": "$x$\n\n" * 40}]]
)
def test_the_end_of_an_answer_is_in_view(open_page: Callable[..., Page], answer: str | list[dict[str, str]]) -> None:
    """Also of one that comes at once, and with its foot, until the reader scrolls away from it."""
    page = open_page(viewport={"width": 390, "height": 600})
    answer_with(page, answer)
    say(page, "Go on")
    wait_for_answers(page)
    page.wait_for_function(AT_END)
    page.click("#toggle-settings")
    page.wait_for_function(AT_END)
    page.click("#toggle-settings")
    page.mouse.move(200, 200)
    page.mouse.wheel(0, -200)
    page.wait_for_function(f"() => !({AT_END})()")
    size(page, 390, 500)
    page.wait_for_function("() => innerHeight === 500")
    assert not page.evaluate(AT_END)


def test_the_settings_do_not_cut_the_heading_of_the_welcome(open_page: Callable[..., Page]) -> None:
    page = open_page(viewport={"width": 390, "height": 844})
    page.click("#toggle-settings")
    page.wait_for_selector("#welcome h2", state="hidden")
    page.click("#toggle-settings")
    page.wait_for_selector("#welcome h2")
    size(page, 1280)
    page.click("#toggle-settings")
    page.wait_for_selector("#welcome h2")
    heading, form = (page.locator(selector).bounding_box() for selector in ("#welcome h2", "#form"))
    assert heading is not None
    assert form is not None
    assert heading["y"] + heading["height"] <= form["y"]
