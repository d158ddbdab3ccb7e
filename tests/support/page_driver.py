"""Driving the page in a browser: what a user does, and answers with given texts in place of the model's."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

ANSWER = ".message.assistant"
CHATS = "**/v1/chat/completions"


def wait_for_answers(page: Page, count: int = 1) -> None:
    """Wait until there are `count` answers and the last one is complete."""
    page.wait_for_function("count => document.querySelectorAll('.message.assistant').length === count", arg=count)
    page.wait_for_selector("#send:visible")


def choose(page: Page, **values: Any) -> None:
    """Set values of the settings."""
    page.click("#toggle-settings")
    for name, value in values.items():
        field = page.locator(f"#settings [name={name}]")
        if isinstance(value, bool):
            field.set_checked(value)
        elif name == "mode":
            field.select_option(value)
        else:
            field.fill(str(value))
    page.click("#toggle-settings")


def say(page: Page, text: str) -> None:
    """Send a message."""
    page.fill("#input", text)
    page.press("#input", "Enter")


def last_answer(page: Page) -> str:
    """Return the text of the last answer."""
    return (page.locator(f"{ANSWER} > .rich").last.text_content() or "").strip()


def stream_of(deltas: Iterable[dict[str, Any]], finish: str = "stop") -> str:
    """Return the events of an answer with these deltas."""
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    events = [json.dumps({"object": "chat.completion.chunk", "choices": [choice]}) for choice in choices]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])


def answer_with(page: Page, *answers: list[dict[str, Any]] | str, finish: str = "stop") -> list[dict[str, Any]]:
    """Answer chats with given texts or deltas, one after another; return the list of bodies that the page sends."""
    bodies: list[dict[str, Any]] = []

    def fulfil(route: Route) -> None:
        answer = answers[min(len(bodies), len(answers) - 1)]
        bodies.append(json.loads(route.request.post_data or ""))
        deltas = [{"content": answer}] if isinstance(answer, str) else answer
        route.fulfill(content_type="text/event-stream", body=stream_of(deltas, finish))

    page.route(CHATS, fulfil)
    return bodies


HOLD = """() => {
    const fetched = globalThis.fetch;
    const held = (globalThis.heldAnswers = new Map());
    globalThis.fetch = async (url, options) => {
        if (!String(url).endsWith("chat/completions")) return fetched(url, options);
        const answer = { isAborted: false };
        const body = new ReadableStream({ start(controller) { answer.controller = controller; } });
        const { messages } = JSON.parse(options.body);
        held.set(messages.at(-1).content, answer);
        options.signal.addEventListener("abort", () => {
            answer.isAborted = true;
            answer.controller.error(new DOMException("", "AbortError"));
        });
        return new Response(body);
    };
}"""


class HeldAnswers:
    """Answers of which a test decides when each part comes; they are named by their questions."""

    def __init__(self, page: Page) -> None:
        self._page = page
        page.evaluate(HOLD)

    def send(self, question: str, text: str, *, ends: bool = False) -> None:
        """Send a part of an answer, and its end."""
        self._page.wait_for_function("question => heldAnswers.has(question)", arg=question)
        events = stream_of([{"content": text}]) if ends else stream_of([{"content": text}]).split("\n\n")[0] + "\n\n"
        self._page.evaluate(
            """([question, events, ends]) => {
                const { controller } = heldAnswers.get(question);
                controller.enqueue(new TextEncoder().encode(events));
                if (ends) controller.close();
            }""",
            [question, events, ends],
        )

    def is_stopped(self, question: str) -> bool:
        """Return whether the page has stopped the answer."""
        return bool(self._page.evaluate("question => heldAnswers.get(question)?.isAborted", question))
