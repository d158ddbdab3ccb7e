"""Conversations that are longer than the model's context, on the page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from http_server import Server
from page_driver import ANSWER, choose, last_answer, say, wait_for_answers

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request

GO_ON = "text=Go on without the oldest messages"
CONTEXT = 2048


def long_message(number: int) -> str:
    return f"number {number} " + "fox " * 500


def watch(page: Page, path: str) -> list[dict[str, Any]]:
    """Return the list of bodies that the page sends to a path of the server."""
    bodies: list[dict[str, Any]] = []

    def note(request: Request) -> None:
        if request.url.endswith(path):
            bodies.append(json.loads(request.post_data or ""))

    page.on("request", note)
    return bodies


def fill_context(page: Page) -> int:
    """Send long messages until one is too long together with those before it; return their number."""
    for number in range(1, 10):
        say(page, long_message(number))
        wait_for_answers(page, number)
        if page.locator(".error").count():
            return number
    raise AssertionError("the context was never full")


def numbers(bodies: list[dict[str, Any]]) -> list[str]:
    """Return which of the user's messages the last body has."""
    texts = [each["content"] for each in bodies[-1]["messages"] if each["role"] == "user"]
    return [text.split()[1] for text in texts]


def test_a_full_context_goes_on_without_the_oldest_messages(open_page: Callable[..., Page], server: Server) -> None:
    page = open_page(expected="400")
    choose(page, max_tokens=5, system="You tell tales.")
    bodies = watch(page, "/v1/chat/completions")
    last = fill_context(page)
    problem, advice = page.inner_text(".error").split(". ")
    assert re.fullmatch(r"This is too long for the model: [^;]*context length [^;]*", problem)
    assert advice == "Shorten the message, or lower max tokens in the settings."
    page.click(GO_ON)
    page.wait_for_selector(".error", state="detached")
    wait_for_answers(page, last)
    assert last_answer(page)
    kept = numbers(bodies)
    assert kept == [str(number) for number in range(last - len(kept) + 1, last + 1)]
    assert 1 <= len(kept) < last
    assert bodies[-1]["messages"][0] == {"role": "system", "content": "You tell tales."}
    more = [*bodies[-1]["messages"]]
    earlier = next(each for each in bodies[-2]["messages"] if each["content"] == long_message(last - len(kept)))
    more.insert(1, earlier)
    count = server.request("/tokenize", {"messages": more}).json()["count"]
    assert count + 5 > CONTEXT, "no more is left out than must be"
    left_out = 2 * (last - len(kept))
    words = f"{left_out} messages above are left out"
    assert words in page.inner_text(".gap")
    assert page.locator(".message:has(~ .gap)").count() == left_out
    page.reload()
    page.wait_for_selector(f".gap:has-text('{words}')")
    say(page, "number next")
    wait_for_answers(page, last + 1)
    assert numbers(bodies)[0] == kept[0]
    page.click(".message.user >> nth=0 >> text=Edit")
    say(page, "number again")
    wait_for_answers(page, 1)
    assert numbers(bodies) == ["again"]
    assert page.locator(".gap").count() == 0


def test_without_a_limit_a_quarter_of_the_context_is_left_for_the_answer(open_page: Callable[..., Page]) -> None:
    page = open_page(expected="400")
    choose(page, max_tokens=5)
    last = fill_context(page)
    page.click("#toggle-settings")
    page.fill("[name=max_tokens]", "")
    page.click("#toggle-settings")
    with page.expect_response("**/tokenize") as counted:
        page.click(GO_ON)
    assert counted.value.ok
    wait_for_answers(page, last)
    page.wait_for_selector(".gap")
    figures = page.locator(f"{ANSWER} .figures").last.inner_text()
    assert "limit" not in figures or int(figures.split()[0]) >= CONTEXT // 4


def test_a_text_to_continue_goes_on_without_its_beginning(open_page: Callable[..., Page]) -> None:
    page = open_page(expected="400")
    choose(page, max_tokens=5, mode="continue")
    bodies = watch(page, "/v1/completions")
    last = fill_context(page)
    page.click(GO_ON)
    page.wait_for_selector(".error", state="detached")
    wait_for_answers(page, last)
    assert "number 1 " not in bodies[-1]["prompt"]
    assert f"number {last} " in bodies[-1]["prompt"]


@pytest.mark.parametrize("has_more", [False, True])
def test_a_single_message_that_is_too_long_is_said_to_be(open_page: Callable[..., Page], has_more: bool) -> None:
    page = open_page(expected="400")
    choose(page, max_tokens=5)
    if has_more:
        say(page, "One")
        wait_for_answers(page)
    say(page, "fox " * 3000)
    wait_for_answers(page, 1 + has_more)
    assert page.locator(GO_ON).count() == has_more
    if has_more:
        page.click(GO_ON)
        page.wait_for_selector(".error:has-text('The last message alone is too long')")
        assert page.locator("text=Try again").count() == 1
    say(page, "Short")
    wait_for_answers(page, 1 + has_more)
    assert page.locator(".error").count() == 0
    assert last_answer(page)


@pytest.mark.parametrize(
    ("given", "start"), [(2, 2), (0, 0), (1, 0), (4, 0), (-1, 0), ("2", 0), ("length", 0), (None, 0), (1.5, 0)]
)
def test_what_is_left_out_survives_export_and_import(open_page: Callable[..., Page], given: Any, start: int) -> None:
    page = open_page()
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    kept = {"id": "a", "title": "A", "messages": messages, "start": given}
    restored = page.evaluate(
        """async (kept) => {
            const { exported, imported } = await import("/page/library.js");
            return imported(exported([kept]))[0].start;
        }""",
        kept,
    )
    assert restored == start


def test_answers_that_are_not_kept_do_not_shift_what_is_left_out(open_page: Callable[..., Page]) -> None:
    page = open_page()
    kept = page.evaluate(
        """async () => {
            const { Conversation } = await import("/page/conversation.js");
            const conversation = new Conversation();
            ["a", "", "b", "c", "d"].forEach((text, index) => {
                conversation.add(index % 2 ? "assistant" : "user", text);
            });
            conversation.start = 2;
            const { messages, start } = new Conversation(conversation.kept);
            return [messages[start].content, conversation.laterTurns];
        }"""
    )
    assert kept == ["b", [4]]
