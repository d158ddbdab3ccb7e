"""The page by keyboard and with a screen reader, on every screen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from page_driver import ANSWER, answer_with, choose, say, wait_for_answers

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDE = {"viewport": {"width": 1400, "height": 800}}
TEXT = "First paragraph.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nx = 1\n```\n"


def test_shortcuts(open_page: Callable[..., Page]) -> None:
    page = open_page(**WIDE)
    answer_with(page, "Yes.")
    say(page, "One")
    wait_for_answers(page)
    page.keyboard.press("Control+/")
    assert page.is_visible("#help")
    page.keyboard.press("Escape")
    assert page.is_hidden("#help")
    page.keyboard.press("Control+k")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.press("Control+,")
    assert page.evaluate("document.activeElement.name") == "system"
    page.keyboard.press("Control+,")
    page.keyboard.press("Control+Shift+F")
    assert page.is_visible("#timeline")
    page.keyboard.press("Escape")
    was_open = page.is_visible("#engine")
    page.keyboard.press("Control+Shift+E")
    assert page.is_visible("#engine") != was_open
    page.focus("#input")
    page.keyboard.press("ArrowUp")
    assert page.input_value("#input") == "One"
    page.keyboard.press("Escape")
    page.keyboard.press("Control+Shift+O")
    assert page.locator(".message").count() == 0
    assert page.evaluate("document.activeElement.id") == "input"


def test_an_answer_is_spoken_block_by_block(open_page: Callable[..., Page]) -> None:
    """The visible log is silent, or each token would be read."""
    page = open_page(**WIDE)
    answer_with(page, TEXT)
    assert page.get_attribute("#log", "role") == "region"
    say(page, "Speak")
    wait_for_answers(page)
    assert page.get_attribute("#spoken", "role") == "log"
    assert page.locator("#spoken p").first.inner_text() == "First paragraph."
    assert page.locator("#spoken p").count() == 3
    assert page.inner_text("#status") == "The answer is complete."


def test_everything_that_takes_the_focus_has_a_name(open_page: Callable[..., Page]) -> None:
    page = open_page(**WIDE)
    answer_with(page, TEXT)
    say(page, "Name")
    wait_for_answers(page)
    page.click("#toggle-settings")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, select, [tabindex='0']")]
            .filter((element) => !element.hidden)
            .filter((element) => !(element.getAttribute("aria-label") || element.labels?.length
                || element.tagName === "BUTTON" && element.textContent.trim()))
            .map((element) => element.outerHTML)"""
    )
    assert nameless == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(({ id }) => id)")
    assert len(ids) == len(set(ids))


def test_the_focus_goes_from_list_to_log_to_field(open_page: Callable[..., Page]) -> None:
    page = open_page(**WIDE)
    answer_with(page, "Yes.")
    say(page, "One")
    wait_for_answers(page)
    page.wait_for_selector("#conversations li[data-id]")
    page.focus("#search")
    order = []
    for _ in range(18):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
    places = [order.index(name) for name in ("open", "export", "log", "attach", "input", "send")]
    assert places == sorted(places)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 768, 3840])
def test_answers_fit_every_window(open_page: Callable[..., Page], scheme: str, width: int) -> None:
    page = open_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    wide = "| a |" + " b |" * 30 + "\n|" + "---|" * 31 + "\n|" + " some words |" * 31
    answer_with(page, f"{wide}\n\n```\n{'code ' * 100}\n```\n\n$${'x + ' * 100} y$$\n\n{'word' * 200}")
    say(page, "Wide")
    wait_for_answers(page)
    page.wait_for_selector(f"{ANSWER} .katex")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("document.querySelector('#log').scrollWidth <= document.querySelector('#log').clientWidth")
    if width == 390:
        page.click("#toggle-library")
        page.wait_for_selector("#conversations li[data-id]")
        assert page.is_hidden("#input")
        page.click("#conversations .open")
        page.wait_for_selector("#input:visible")


def test_reading_text_has_enough_contrast(open_page: Callable[..., Page]) -> None:
    for scheme in ("light", "dark"):
        page = open_page(color_scheme=scheme, **WIDE)
        answer_with(page, "```python\n# comment\ndef f(x: int) -> str:\n    return 'a' + 1\n```")
        choose(page, system="Be brief.")
        say(page, "Colours")
        wait_for_answers(page)
        page.wait_for_selector(".hljs-keyword")
        ratios = page.evaluate(
            """() => {
                const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
                const light = (colour) => {
                    context.fillStyle = colour;
                    context.fillRect(0, 0, 1, 1);
                    const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((value) => {
                        const part = value / 255;
                        return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
                    });
                    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
                };
                const background = (element) => {
                    for (let each = element; each; each = each.parentElement) {
                        const { backgroundColor } = getComputedStyle(each);
                        if (/^rgb\\(/.test(backgroundColor)) return backgroundColor;
                    }
                    return "white";
                };
                return [...document.querySelectorAll(".code span, .code-head span, .foot span, .who, .hints button")]
                    .filter((element) => element.textContent.trim())
                    .map((element) => {
                        const tones = [light(getComputedStyle(element).color), light(background(element))];
                        const ratio = (Math.max(...tones) + 0.05) / (Math.min(...tones) + 0.05);
                        return [element.className || element.textContent, ratio];
                    });
            }"""
        )
        assert ratios
        assert [each for each in ratios if each[1] < 4.5] == []
