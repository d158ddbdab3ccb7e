"""The adapters of a model on the page: their names, paths and open requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from demo_adapters import write_demo_adapter
from http_server import Server
from openai import OpenAI

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDE: dict[str, Any] = {"viewport": {"width": 1600, "height": 1000}}  # where the engine is shown beside the chat


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_adapter(tmp_path_factory.mktemp("adapters") / "tales", 1)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that loads adapters, in whose place the page's other tests have one without."""
    with Server.start("--num-pages", "128", "--enable-lora", "--allow-runtime-lora") as server:
        yield server


def test_adapters_are_a_table_while_there_are_some(
    open_page: Callable[..., Page], server: Server, folder: Path
) -> None:
    page = open_page(**WIDE)
    page.wait_for_selector("#pulse.idle")
    assert page.locator("#adapters").is_hidden()
    server.request("/v1/load_lora_adapter", {"lora_name": "tales", "lora_path": str(folder)})
    table = page.get_by_role("table", name="Adapters 1")
    table.wait_for()
    assert table.get_by_role("columnheader").all_inner_texts() == ["Name", "Own", "Path"]
    row = table.get_by_role("row").nth(1)
    assert row.get_by_role("rowheader").inner_text() == "tales"
    assert row.get_by_role("cell").all_inner_texts() == ["0", str(folder)]
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        client.completions.create(
            model="tales", prompt="A fox", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
        ),
    ):
        page.wait_for_selector("#adapters .requests:text-is('1')")
    page.wait_for_selector("#adapters .requests:text-is('0')")
    server.request("/v1/unload_lora_adapter", {"lora_name": "tales"})
    page.wait_for_selector("#adapters", state="hidden")
