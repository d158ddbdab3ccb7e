"""`/docs`: the page that documents the endpoints."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from http_server import Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser

MESSAGES = [{"role": "user", "content": "x"}]


def test_all_of_its_files_are_served_here_and_its_policy_allows_no_others(server: Server) -> None:
    page = server.request("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(rb"<script>|<style|https?://", page.body)
    files = re.findall(r'(?:href|src)="((?:docs|page)/[^"]+)"', page.body.decode())
    assert len(files) == 3
    assert all(server.request(f"/{file}").status == 200 for file in files)
    again = server.request("/docs", headers={"If-None-Match": page.headers["etag"]})
    assert (again.status, again.body) == (304, b"")


def test_it_shows_all_operations_and_sends_a_request(server: Server, browser: Browser) -> None:
    from playwright.sync_api import expect

    problems: list[str] = []
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(f"{server.url}/docs")
    chat = page.locator("#post_v1_chat_completions")
    expect(chat.locator(".curl pre")).to_contain_text(f"curl {server.url}/v1/chat/completions")
    document = server.request("/openapi.json").json()
    assert page.locator(".operation").count() == sum(map(len, document["paths"].values()))
    chat.get_by_text("Fields", exact=True).click()
    field = chat.locator(".field", has_text="top_p").first
    expect(field).to_contain_text("number, at least 0, at most 1")
    chat.get_by_text("Try it").click()
    chat.get_by_label("Body").fill(json.dumps({"messages": MESSAGES, "stream": True, "max_tokens": 3}))
    chat.get_by_role("button", name="Send").click()
    expect(chat.get_by_role("status")).to_have_text(re.compile("^200"))
    expect(chat.locator("form pre")).to_contain_text("data: [DONE]")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()
    assert not problems
