"""Long bodies delay no stream: slow work does not run on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from http_app import models_of
from http_server import Server
from starlette.testclient import TestClient

from quire.frontend import AsyncLLM
from quire.frontend.http.app import make_app

TEXT = "Once upon a time there was a fox. " * 30  # short by itself


@pytest.fixture
def llm(server: Server) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(engine_address=server.engine_address)
    yield llm
    llm.close()


@pytest.fixture
def client(llm: AsyncLLM) -> TestClient:
    """Run the server in this process."""
    return TestClient(make_app(models_of(llm)), base_url="http://localhost")


@pytest.fixture
def on_loop(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record for each call of the tokenizer whether it runs on the event loop."""
    seen: list[bool] = []

    def watch(work: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            seen.append(asyncio._get_running_loop() is not None)
            return work(*arguments, **options)

        return watched

    tokenizer: Any = llm.tokenizer
    for name in ("encode", "decode", "token_text"):
        monkeypatch.setattr(tokenizer, name, watch(getattr(tokenizer, name)))
    return seen


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [TEXT] * 30, "max_tokens": 1, "truncate_prompt_tokens": 2}),
        ("/v1/completions", {"prompt": [TEXT] * 30, "max_tokens": 1, "truncate_prompt_tokens": 2, "stream": True}),
        ("/v1/embeddings", {"input": [TEXT] * 30, "truncate_prompt_tokens": 2}),
        ("/v1/completions", {"prompt": TEXT * 30, "max_tokens": 1, "truncate_prompt_tokens": 2}),
        ("/tokenize", {"prompt": TEXT * 30}),
        ("/tokenize", {"prompt": TEXT * 90, "return_token_strs": True}),
        ("/detokenize", {"tokens": [69] * 30_000}),
        ("/tokenize", {"content": TEXT * 30}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_long_body_is_tokenized_off_the_event_loop(
    client: TestClient, on_loop: list[bool], path: str, body: dict[str, Any]
) -> None:
    assert client.post(path, json=body).status_code == 200
    assert on_loop
    assert not any(on_loop)


def test_a_short_body_is_tokenized_on_the_event_loop(client: TestClient, on_loop: list[bool]) -> None:
    assert client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 1}).status_code == 200
    assert on_loop == [True, True]


def test_long_and_short_bodies_give_the_same_prompts(client: TestClient) -> None:
    options = {"max_tokens": 1, "truncate_prompt_tokens": 4, "add_special_tokens": False, "return_token_ids": True}
    [alone] = client.post("/v1/completions", json={"prompt": "fox" + TEXT, **options}).json()["choices"]
    many = client.post("/v1/completions", json={"prompt": ["fox" + TEXT] * 30, **options}).json()["choices"]
    short = client.post("/v1/completions", json={"prompt": ["a fox"] * 30 + [""], **options})
    refused = client.post("/v1/completions", json={"prompt": [TEXT] * 30 + [""], **options})
    assert {tuple(choice["prompt_token_ids"]) for choice in many} == {tuple(alone["prompt_token_ids"])}
    assert short.status_code == refused.status_code == 400
    assert short.json() == refused.json()
