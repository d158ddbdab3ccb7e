"""What an empty conversation shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from http_server import Server
from page_driver import answer_with, choose, last_answer, wait_for_answers

if TYPE_CHECKING:
    from playwright.sync_api import Page

EXAMPLE = "#examples button"


def test_the_demo_model_is_explained_and_an_example_answered(open_page: Callable[..., Page]) -> None:
    page = open_page()
    choose(page, max_tokens=8)
    page.wait_for_selector("#welcome-text:text('demo model')")
    assert "no facts" in page.inner_text("#welcome-text")
    assert "nowhere else" in page.inner_text("#welcome-text")
    example = page.inner_text(f"{EXAMPLE} >> nth=0")
    page.fill("#input", "a draft")
    page.click(f"{EXAMPLE} >> nth=0")
    wait_for_answers(page)
    assert page.inner_text(".message.user .text") == example
    assert last_answer(page)
    assert page.input_value("#input") == "a draft"
    page.click("#new")
    assert page.locator(EXAMPLE).count() == 2
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(("can_chat", "words"), [(True, "Your messages"), (False, "continues texts")])
def test_other_models_have_examples_of_their_kind(
    open_page: Callable[..., Page], server: Server, can_chat: bool, words: str
) -> None:
    page = open_page()
    card: dict[str, Any] = server.request("/v1/models").json()["data"][0]
    card |= {"root": "/models/other", "has_chat_template": can_chat}
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": [card]}))
    page.reload()
    page.wait_for_selector(f"{EXAMPLE}:text('{'bicycle' if can_chat else 'Once upon'}')")
    assert page.inner_text("#welcome-text").startswith(words if can_chat else "This model")
    assert words in page.inner_text("#welcome-text")
    assert "demo" not in page.inner_text("#welcome-text")
    if can_chat:
        bodies = answer_with(page, "It leans.")
        page.click(EXAMPLE)
        wait_for_answers(page)
        assert bodies[0]["messages"][-1]["content"] == "Explain how a bicycle stays upright"
