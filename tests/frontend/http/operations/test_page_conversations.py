"""Conversations that the browser keeps, and files that go with messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from page_driver import ANSWER, HeldAnswers, answer_with, last_answer, say, wait_for_answers

if TYPE_CHECKING:
    from playwright.sync_api import FilePayload, Page

WIDE = {"viewport": {"width": 1400, "height": 800}}
ITEMS = "#conversations li[data-id]"


def talk(page: Page, *texts: str) -> None:
    """Hold a conversation of its own with each text."""
    for text in texts:
        page.click("#new")
        say(page, text)
        wait_for_answers(page)
        page.wait_for_selector(f"{ITEMS}.current .open[title={json.dumps(text)}]")


def titles(page: Page) -> list[str]:
    return list(page.locator(f"{ITEMS} .open").evaluate_all("items => items.map(({ title }) => title)"))


def test_a_reload_shows_the_same_conversation(open_page: Callable[..., Page]) -> None:
    page = open_page(**WIDE)
    answer_with(page, [{"reasoning_content": "Hm."}, {"content": "The *fox* did."}], "And then?")
    talk(page, "Who took the cheese?")
    page.reload()
    page.wait_for_selector(f"{ANSWER} em:text('fox')")
    assert page.title() == "Who took the cheese? · Quire"
    assert page.inner_text(f"{ANSWER} .thoughts summary") == "Thoughts"
    bodies = answer_with(page, "Go on.")
    say(page, "So?")
    wait_for_answers(page, 2)
    assert [each["content"] for each in bodies[0]["messages"]] == ["Who took the cheese?", "The *fox* did.", "So?"]
    page.click("#new")
    page.reload()
    page.wait_for_selector(ITEMS)
    assert page.locator(".message").count() == 0


def test_conversations_are_searched_renamed_and_deleted(open_page: Callable[..., Page]) -> None:
    page = open_page(**WIDE)
    answer_with(page, "A cheese.", "A bridge.", "A crown.")
    talk(page, "What did the crow have?", "What did the troll build?", "What did the king wear?")
    assert titles(page) == ["What did the king wear?", "What did the troll build?", "What did the crow have?"]
    page.fill("#search", "BRIDGE troll")
    page.wait_for_selector("#library-note:text('1 found')")
    assert titles(page) == ["What did the troll build?"]
    assert page.inner_text(f"{ITEMS} mark") == "bridge"
    page.click(f"{ITEMS} .open")
    page.wait_for_selector(f"{ANSWER} .rich:has-text('A bridge.')")
    page.fill("#search", "nothing of the kind")
    page.wait_for_selector("#library-note:text('No conversation')")
    page.fill("#search", "")
    page.wait_for_function("() => document.querySelectorAll('#conversations li[data-id]').length === 3")

    page.hover(f"{ITEMS} >> nth=1")
    page.click("[aria-label='Rename What did the troll build?']")
    page.fill(f"{ITEMS} input", "The troll")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{ITEMS} .open:text('The troll')")
    page.click(f"{ITEMS} .open:text('The troll')")
    assert page.title() == "The troll · Quire"

    page.hover(f"{ITEMS}.current")
    page.click("[aria-label='Delete The troll']")
    page.wait_for_function("() => document.querySelectorAll('#conversations li[data-id]').length === 2")
    assert page.locator(".message").count() == 0
    page.click("#toast >> text=Undo")
    page.wait_for_selector(f"{ITEMS}.current .open:text('The troll')")
    assert last_answer(page) == "A bridge."


def test_export_and_import(open_page: Callable[..., Page], tmp_path: Path) -> None:
    page = open_page(**WIDE)
    answer_with(page, "A cheese.", "A bridge.")
    talk(page, "The crow?", "The troll?")
    with page.expect_download() as download:
        page.click("#export")
    file = tmp_path / "export.json"
    download.value.save_as(file)
    kept = json.loads(file.read_text())
    assert {each["title"] for each in kept["conversations"]} == {"The crow?", "The troll?"}

    other = open_page(**WIDE)
    other.set_input_files("#import-file", file)
    other.wait_for_selector("#toast:has-text('Imported 2 conversations.')")
    assert sorted(titles(other)) == ["The crow?", "The troll?"]
    other.click(f"{ITEMS} .open:text('The crow?')")
    other.wait_for_selector(f"{ANSWER} .rich:has-text('A cheese.')")

    for text, problem in [("nonsense", "not JSON"), ("{}", "no conversations"), (damaged(kept), "damaged")]:
        file.write_text(text)
        other.set_input_files("#import-file", file)
        other.wait_for_selector(f"#toast:has-text('{problem}')")
    assert len(titles(other)) == 2


def damaged(kept: dict[str, object]) -> str:
    return json.dumps({**kept, "conversations": [{"id": "x", "messages": [{"role": "system", "content": "x"}]}]})


def test_an_earlier_message_is_edited(open_page: Callable[..., Page]) -> None:
    page = open_page(**WIDE)
    bodies = answer_with(page, "One.", "Two.", "Three.")
    talk(page, "First")
    say(page, "Second")
    wait_for_answers(page, 2)
    page.click(".message.user >> nth=0 >> text=Edit")
    assert page.locator(".message.replaced").count() == 1
    page.fill("#input", "Another")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{ANSWER} .rich:has-text('Three.')")
    wait_for_answers(page)
    assert [each["content"] for each in bodies[2]["messages"]] == ["Another"]
    page.wait_for_selector(f"{ITEMS}:has-text('Another')")  # it is kept before it is listed
    assert titles(page) == ["Another"]


def test_a_conversation_that_is_left_is_answered_to_the_end(open_page: Callable[..., Page]) -> None:
    page = open_page(**WIDE)
    page.click("#toggle-settings")
    page.fill("[name=max_tokens]", "600")
    page.fill("[name=temperature]", "5")
    page.fill("[name=seed]", "2")
    page.click("#toggle-settings")
    say(page, "A long tale")
    page.wait_for_function("() => document.querySelector('.message.assistant .rich')?.innerText.length > 40")
    page.click("#new")
    page.wait_for_function(f"() => document.querySelector('{ITEMS} .mark').dataset.state !== 'answering'")
    page.reload()
    page.click(f"{ITEMS} .open")
    page.wait_for_selector(ANSWER)
    assert page.inner_text(f"{ANSWER} .figures").startswith("600 tokens")


def mark_of(page: Page, title: str) -> str:
    """Return the mark of a conversation in the list: "answering", "new" or nothing."""
    return str(
        page.evaluate("title => document.querySelector(`.open[title='${title}'] .mark`).dataset.state ?? ''", title)
    )


def go_to(page: Page, title: str) -> None:
    """Open a conversation from the list."""
    page.click(f"{ITEMS} .open[title='{title}']")
    page.wait_for_selector(f"{ITEMS}.current .open[title='{title}']")


def ask(page: Page, *questions: str) -> HeldAnswers:
    """Begin a conversation with each question; none is answered yet."""
    answers = HeldAnswers(page)
    for question in questions:
        page.click("#new")
        say(page, question)
        page.wait_for_selector(f"{ITEMS}.current .open[title='{question}']")
    return answers


def test_several_conversations_are_answered_at_once(open_page: Callable[..., Page]) -> None:
    page = open_page(**WIDE)
    answers = ask(page, "One", "Two", "Three")
    assert [mark_of(page, title) for title in ("One", "Two", "Three")] == ["answering"] * 3
    assert page.get_by_role("button", name="Being answered: One").count() == 1
    for number in range(3):
        for title in ("Three", "One", "Two"):
            answers.send(title, f"{title} {number}. ")
    go_to(page, "One")
    page.wait_for_selector(f"{ANSWER} .rich:has-text('One 0. One 1. One 2.')")
    assert page.is_visible("#stop")
    answers.send("One", "*More* of it.")
    page.wait_for_selector(f"{ANSWER} .rich em:text('More')")
    page.click("#new")
    assert page.is_visible("#send")
    assert page.locator(".message").count() == 0
    answers.send("Two", "The end.", ends=True)
    page.wait_for_function(
        f"() => document.querySelector(\"{ITEMS} .open[title='Two'] .mark\").dataset.state === 'new'"
    )
    assert page.inner_text("#status") == "The answer in Two is complete."
    assert (mark_of(page, "One"), mark_of(page, "Three")) == ("answering", "answering")
    answers.send("One", "", ends=True)
    page.wait_for_function(
        f"() => document.querySelector(\"{ITEMS} .open[title='One'] .mark\").dataset.state === 'new'"
    )
    go_to(page, "Two")
    assert last_answer(page) == "Two 0. Two 1. Two 2. The end."
    assert mark_of(page, "Two") == ""
    go_to(page, "Three")
    answers.send("Three", "", ends=True)
    wait_for_answers(page)
    assert mark_of(page, "Three") == ""
    page.reload()
    for title, end in (("One", "More of it."), ("Two", "The end."), ("Three", "Three 2.")):
        go_to(page, title)
        assert last_answer(page).startswith(f"{title} 0. {title} 1. {title} 2.")
        assert last_answer(page).endswith(end)


def test_stop_stops_the_answer_that_is_shown(open_page: Callable[..., Page]) -> None:
    page = open_page(**WIDE)
    answers = ask(page, "One", "Two")
    for title in ("One", "Two"):
        answers.send(title, "Begun. ")
    go_to(page, "One")
    page.wait_for_selector(f"{ANSWER} .rich:has-text('Begun.')")
    page.click("#stop")
    wait_for_answers(page)
    assert page.inner_text(f"{ANSWER} .figures").endswith("stopped")
    assert (answers.is_stopped("One"), answers.is_stopped("Two")) == (True, False)
    assert (mark_of(page, "One"), mark_of(page, "Two")) == ("", "answering")
    page.click("#new")
    page.keyboard.press("Escape")
    assert not answers.is_stopped("Two")
    answers.send("Two", "Ended.", ends=True)
    go_to(page, "Two")
    wait_for_answers(page)
    assert last_answer(page) == "Begun. Ended."


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_conversation_is_deleted_while_it_is_answered(open_page: Callable[..., Page], is_shown: bool) -> None:
    page = open_page(**WIDE)
    answers = ask(page, "One", "Two")
    for title in ("One", "Two"):
        answers.send(title, "Begun. ")
    go_to(page, "One")
    page.wait_for_selector(f"{ANSWER} .rich:has-text('Begun.')")
    if not is_shown:
        go_to(page, "Two")
    page.hover(f"{ITEMS}:has(.open[title='One'])")
    page.click("[aria-label='Delete One']")
    page.wait_for_function("() => document.querySelectorAll('#conversations li[data-id]').length === 1")
    assert (answers.is_stopped("One"), answers.is_stopped("Two")) == (True, False)
    assert page.locator(".message").count() == (0 if is_shown else 2)
    answers.send("Two", "Ended.", ends=True)
    go_to(page, "Two")
    wait_for_answers(page)
    assert titles(page) == ["Two"]
    page.click("#toast >> text=Undo")
    page.wait_for_selector(f"{ITEMS}.current .open[title='One']")
    assert last_answer(page) == "Begun."
    assert "incomplete" in page.inner_text(f"{ANSWER} .figures")


def test_a_conversation_is_renamed_while_it_is_answered_in_the_background(open_page: Callable[..., Page]) -> None:
    page = open_page(**WIDE)
    answers = ask(page, "One", "Two")
    page.hover(f"{ITEMS}:has(.open[title='One'])")
    page.click("[aria-label='Rename One']")
    page.fill(f"{ITEMS} input", "The first")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{ITEMS} .open[title='The first']")
    answers.send("One", "Ended.", ends=True)
    page.wait_for_function("() => document.querySelector(\".open[title='The first'] .mark\").dataset.state === 'new'")
    go_to(page, "The first")
    assert last_answer(page) == "Ended."
    assert page.title() == "The first · Quire"


def test_a_reload_keeps_what_all_answers_have(open_page: Callable[..., Page]) -> None:
    page = open_page(**WIDE)
    answers = ask(page, "One", "Two")
    for title in ("One", "Two"):
        answers.send(title, f"{title} begins. ")
    page.wait_for_selector(f"{ANSWER} .rich:has-text('Two begins.')")
    page.evaluate(
        """() => {
            Object.defineProperty(document, "hidden", { get: () => true });
            document.dispatchEvent(new Event("visibilitychange"));
        }"""
    )
    page.wait_for_function(
        """async () => {
            const { Library } = await import("/page/library.js");
            const kept = await new Library(() => {}).all();
            return kept.length === 2 && kept.every(({ messages }) => messages.length === 2);
        }"""
    )
    page.reload()
    page.wait_for_selector(f"{ANSWER} .rich:has-text('Two begins.')")
    assert "incomplete" in page.inner_text(f"{ANSWER} .figures")
    go_to(page, "One")
    assert last_answer(page) == "One begins."
    assert mark_of(page, "One") == ""
    bodies = answer_with(page, "One again.")
    page.click("text=Regenerate")
    wait_for_answers(page)
    assert last_answer(page) == "One again."
    assert [each["content"] for each in bodies[0]["messages"]] == ["One"]


def test_text_files_are_attached(open_page: Callable[..., Page]) -> None:
    page = open_page(**WIDE)
    bodies = answer_with(page, "Read.")
    poem: FilePayload = {"name": "poem.md", "mimeType": "text/markdown", "buffer": b"A ```fenced``` poem\n"}
    binary: FilePayload = {"name": "image.png", "mimeType": "image/png", "buffer": b"\x89PNG\0\xff"}
    large: FilePayload = {"name": "large.txt", "mimeType": "text/plain", "buffer": b"x" * 600_000}
    page.set_input_files("#attach-file", [poem, binary, large])
    page.wait_for_selector("#refused:visible")
    refused = page.inner_text("#refused")
    assert "image.png is not a text file" in refused
    assert "large.txt is too large" in refused
    assert page.locator("#files li").count() == 1
    say(page, "What is it?")
    wait_for_answers(page)
    assert bodies[0]["messages"][0]["content"] == "File poem.md:\n````\nA ```fenced``` poem\n````\n\nWhat is it?"
    assert page.inner_text(".message.user .file summary") == "poem.md · 20 B"
    page.reload()
    page.wait_for_selector(".message.user .file")
    page.click(".message.user >> text=Edit")
    assert page.locator("#files li").count() == 1
    page.click("[aria-label='Remove poem.md']")
    assert page.is_hidden("#files")


def test_files_are_dropped(open_page: Callable[..., Page]) -> None:
    page = open_page(**WIDE)
    transfer = page.evaluate_handle(
        """() => {
            const transfer = new DataTransfer();
            transfer.items.add(new File(["a,b\\n1,2\\n"], "table.csv"));
            return transfer;
        }"""
    )
    page.dispatch_event("#log", "dragover", {"dataTransfer": transfer})
    assert page.is_visible("#drop")
    page.dispatch_event("#log", "drop", {"dataTransfer": transfer})
    page.wait_for_selector("#files li:text('table.csv')")
    assert page.is_hidden("#drop")


def test_a_browser_that_keeps_nothing(open_page: Callable[..., Page]) -> None:
    page = open_page(**WIDE)
    page.add_init_script("Object.defineProperty(window, 'indexedDB', { get() { throw new Error('forbidden'); } })")
    page.reload()
    answer_with(page, "Fine.")
    talk(page, "Anyway")
    assert "keeps nothing" in page.inner_text("#library-note")
    assert titles(page) == ["Anyway"]
