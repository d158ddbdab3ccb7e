"""The settings of the page show what the server does without them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from http_server import Server
from page_driver import answer_with, choose, say, wait_for_answers

if TYPE_CHECKING:
    from playwright.sync_api import Page

NAMES = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]


def shown(page: Page, name: str) -> str | None:
    return page.get_attribute(f"#settings [name={name}]", "placeholder")


def test_the_server_tells_its_defaults(server: Server) -> None:
    [card] = server.request("/v1/models").json()["data"]
    assert list(card["sampling_defaults"]) == NAMES


def test_empty_fields_show_the_servers_defaults(open_page: Callable[..., Page], server: Server) -> None:
    page = open_page()
    card = server.request("/v1/models").json()["data"][0]
    values = {"temperature": 0.65, "top_p": 0.9, "top_k": 40, "min_p": 0, "repetition_penalty": 1.05}
    card["sampling_defaults"].update(values)
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": [card]}))
    page.reload()
    page.wait_for_selector("#settings [name=temperature][placeholder='0.65']", state="attached")
    assert [shown(page, name) for name in NAMES] == ["0.65", "0.9", "40", "Off", "1.05", "0", "0"]
    assert shown(page, "max_tokens") == f"Up to {card['max_model_len']}"


def test_only_values_of_ones_own_are_sent(open_page: Callable[..., Page]) -> None:
    page = open_page()
    bodies = answer_with(page, "Yes.")
    say(page, "One")
    wait_for_answers(page)
    choose(page, temperature=0.5, system="Be brief.")
    assert page.inner_text("#settings-set") == "2 of your own"
    say(page, "Two")
    wait_for_answers(page, 2)
    page.click("#toggle-settings")
    page.click("#reset-settings")
    page.click("#toggle-settings")
    assert page.inner_text("#settings-set") == ""
    say(page, "Three")
    wait_for_answers(page, 3)
    plain = {"model", "stream", "stream_options", "return_route", "messages"}
    assert [set(body) - plain for body in bodies] == [set(), {"temperature"}, set()]
    assert [body["messages"][0]["role"] for body in bodies] == ["user", "system", "user"]


def test_tools_that_are_not_a_list_are_not_sent(open_page: Callable[..., Page]) -> None:
    page = open_page()
    bodies = answer_with(page, "Yes.")
    choose(page, tools=json.dumps({"type": "function"}))
    say(page, "One")
    page.wait_for_selector("#settings [name=tools]:focus")
    assert not bodies
    assert page.input_value("#input") == "One"
