"""Large answers take turns of the event loop, and tenants take turns at threads."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from http_app import models_of
from http_server import Server
from patience import PATIENCE
from starlette.testclient import TestClient

from quire.frontend import AsyncLLM, turns
from quire.frontend.client.engine import ConnectedEngine
from quire.frontend.http.app import HttpExchange, make_app
from quire.frontend.http.args import ServerArgs
from quire.frontend.http.transport.long_work import LONG_BODY
from quire.frontend.text.chat import answer_grammar
from quire.frontend.text.chat.answer_format import AnswerFormat
from quire.frontend.text.prompts import LONG_TEXT
from quire.frontend.text.threads import FairThreads
from quire.frontend.turns import LoopTurns, current_work
from quire.protocol.grammar.gbnf import lark_of

KEYS = ("first", "second")
TALE = [{"role": "user", "content": "Tell me a tale."}]
PROMPT = [*range(10, 210)]


@pytest.fixture
def llm(server: Server) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(engine_address=server.engine_address)
    yield llm
    llm.close()


def client_of(llm: AsyncLLM, **args: Any) -> TestClient:
    """Run the server in this process."""
    app = make_app(models_of(llm, ServerArgs(**args)))
    return TestClient(app, base_url="http://localhost")


class SlowClock:
    """A clock by which every item takes half a slice."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += turns.SLICE_SECONDS / 2
        return self.now


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Record the turns of the loop in which long work is done, which is slow."""
    seen: list[None] = []
    begin = LoopTurns._begin

    def counted(own: LoopTurns) -> None:
        seen.append(None)
        begin(own)

    monkeypatch.setattr(turns, "time", SlowClock())
    monkeypatch.setattr(LoopTurns, "_begin", counted)
    return seen


@pytest.mark.parametrize(
    ("path", "body", "items"),
    [
        ("/v1/completions", {"prompt": "a", "n": 20, "logprobs": 2, "max_tokens": 10}, 20 * 10 * 2),
        ("/v1/completions", {"prompt": "a", "n": 20, "logprobs": 2, "max_tokens": 10, "stream": True}, 20 * 10 * 2),
        ("/v1/completions", {"prompt": PROMPT, "logprobs": 2, "max_tokens": 0, "echo": True}, 2 * len(PROMPT)),
        ("/v1/completions", {"prompt": PROMPT, "prompt_logprobs": 2, "max_tokens": 1}, 2 * len(PROMPT)),
        ("/v1/completions", {"prompt": ["a"] * 100, "max_tokens": 1}, 4 * 100),
        ("/v1/completions", {"prompt": ["a"] * 100, "max_tokens": 1, "stream": True}, 3 * 100),
        ("/v1/chat/completions", {"messages": TALE, "n": 20, "logprobs": True, "max_tokens": 10}, 20 * 10 * 2),
        ("/v1/embeddings", {"input": ["a"] * 100}, 4 * 100),
        ("/pooling", {"input": ["a"] * 100}, 4 * 100),
        ("/rerank", {"query": "a", "documents": ["a"] * 100}, 4 * 100),
        ("/completion", {"prompt": ["a"] * 50, "n_predict": 2}, 3 * 50),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_loop_turns_between_the_parts_of_a_large_answer(
    llm: AsyncLLM, slices: list[None], path: str, body: dict[str, Any], items: int
) -> None:
    """A turn has place for an item or two of a piece of work, and for at most eight of its tasks."""
    answer = client_of(llm).post(path, json={**body, "ignore_eos": True} if "max_tokens" in body else body)
    assert answer.status_code == 200, answer.text
    assert len(slices) >= items / 10


def test_a_body_sent_in_parts_is_whole(llm: AsyncLLM) -> None:
    body = {"messages": TALE, "n": 40, "logprobs": True, "top_logprobs": 20, "max_tokens": 12, "ignore_eos": True}
    answer = client_of(llm).post("/v1/chat/completions", json=body)
    assert len(answer.content) == int(answer.headers["content-length"]) > 2 << 18
    for choice in answer.json()["choices"]:
        assert [len(token["top_logprobs"]) for token in choice["logprobs"]["content"]] == [20] * 12


def test_one_prompt_that_fails_ends_the_others(llm: AsyncLLM) -> None:
    prompts = [[*PROMPT]] * 30 + [[1] * (llm.max_model_len + 1)]
    answer = client_of(llm).post("/v1/completions", json={"prompt": prompts, "max_tokens": 500, "ignore_eos": True})
    assert answer.status_code == 400
    assert f"{llm.max_model_len + 1} tokens" in answer.json()["error"]["message"]
    vectors = client_of(llm).post("/v1/embeddings", json={"input": prompts})
    assert vectors.status_code == 400
    assert len(llm._table) == 0


LONG_CHAT = [{"role": ("user", "assistant")[turn % 2], "content": "hi", "left_over": [turn]} for turn in range(2001)]
BROKEN_CHAT = [*LONG_CHAT[:-1], {"role": "user", "content": 7, "left_over": [7]}]


def num_marked() -> int:
    """Return how many messages and exchanges there are in this process."""
    found = (each for each in gc.get_objects() if type(each) in (dict, HttpExchange))
    return sum(type(each) is HttpExchange or "left_over" in each for each in found)


@pytest.mark.parametrize("messages", [LONG_CHAT, BROKEN_CHAT], ids=["too long", "broken"])
@pytest.mark.parametrize(
    ("path", "field", "others"),
    [
        ("/v1/chat/completions", "messages", {}),
        ("/v1/chat/completions", "messages", {"stream": True}),
        ("/v1/messages", "messages", {"max_tokens": 1}),
        ("/v1/responses", "input", {}),
        ("/api/chat", "messages", {"truncate": False}),
        ("/apply-template", "messages", {"chat_template_kwargs": {"self": 1}}),
    ],
    ids=str,
)
def test_a_body_that_is_rejected_goes_with_its_answer(
    llm: AsyncLLM, path: str, field: str, others: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    """None is left to the garbage collector, which holds everything up while it goes through thousands of messages."""
    content, before = json.dumps({field: messages, **others}), num_marked()
    gc.disable()
    try:
        answer = client_of(llm).post(path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
        end = time.monotonic() + PATIENCE
        while (kept := num_marked() - before) and time.monotonic() < end:
            pass  # a thread may still be leaving its work
        assert not kept
    finally:
        gc.enable()


def test_the_format_of_a_template_is_detected_once_and_off_the_loop(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    detect = ConnectedEngine._detect_format
    template = "{{ messages[0].content }}" + "{# a comment #}" * LONG_TEXT

    def noted(own: ConnectedEngine, source: str) -> AnswerFormat:
        if source == template:
            seen.append(threading.current_thread().name)
        return detect(own, source)

    monkeypatch.setattr(ConnectedEngine, "_detect_format", noted)
    client = client_of(llm, trust_request_chat_template=True)
    body = {"messages": TALE, "max_tokens": 1, "chat_template": template}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    (name,) = seen
    assert name.startswith("quire-python")


def test_gbnf_of_a_kilobyte_is_translated_on_a_thread(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def noted(grammar: str) -> str:
        names.append(threading.current_thread().name)
        return lark_of(grammar)

    monkeypatch.setattr(answer_grammar, "lark_of", noted)
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    gbnf = "root ::= " + '"a" ' * 300
    body = {
        "messages": TALE,
        "tools": [{"type": "function", "function": function}],
        "structured_outputs": {"grammar": gbnf},
        "truncate_prompt_tokens": 50,
        "max_tokens": 1,
    }
    answer = client_of(llm).post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert [name.startswith("quire-python") for name in names] == [True]


def test_work_is_for_the_tenant_of_the_key(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def noted(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def run(*given: Any) -> Any:
            seen.append(current_work().tenant)
            return await method(*given)

        return run

    monkeypatch.setattr(FairThreads, "run", noted(FairThreads.run))
    client = client_of(llm, api_key=KEYS)
    by_key = []
    for key in KEYS:
        headers, text = {"Authorization": f"Bearer {key}"}, "a fox " * (LONG_BODY // 5)
        for path, body in (
            ("/v1/chat/completions", {"messages": TALE, "max_tokens": 1}),
            ("/tokenize", {"prompt": text}),
            ("/detokenize", {"tokens": PROMPT * 100}),
        ):
            assert client.post(path, json=body, headers=headers).status_code == 200
        by_key.append([*seen])
        seen.clear()
    first, second = map(set, by_key)
    assert len(by_key[0]) == len(by_key[1]) >= 3
    assert len(first) == len(second) == 1
    assert len({"", *first, *second}) == 3
