"""`/props`, `/slots`, `/apply-template`, `/embedding`, `/tokenize` and `/detokenize` in llama.cpp's forms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_watch import EngineWatch
from http_server import Server
from raw_http import RawConnection, post

LONG: Any = {"prompt": "Once upon a time", "n_predict": 2000, "ignore_eos": True}


def test_properties_are_those_of_the_model_and_the_server(server: Server) -> None:
    props = server.request("/props").json()
    card = server.request("/v1/models").json()["data"][0]
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == card["max_model_len"]
    for name in ("temperature", "top_p", "top_k", "min_p"):
        assert settings["params"][name] == card["sampling_defaults"][name]
    assert (props["model_alias"], props["model_path"]) == (card["id"], card["root"])
    assert "<|" in props["chat_template"]
    assert (props["bos_token"], props["eos_token"]) == ("<|begin|>", "<|end|>")
    assert props["total_slots"] == len(server.request("/slots").json())
    assert server.request("/props", {}).status == 405


@pytest.fixture(scope="module")
def narrow() -> Iterator[Server]:
    """Start a server that runs one request at a time."""
    with Server.start("--max-num-seqs", "1") as server:
        yield server


def test_a_slot_is_a_request_that_runs(narrow: Server) -> None:
    [idle] = narrow.request("/slots?fail_on_no_slot=1").json()
    assert (idle["is_processing"], idle["id_task"]) == (False, -1)
    with EngineWatch(narrow) as watch, RawConnection(narrow.url).send(post("/completion", LONG)):
        number = watch.decode()
        [slot] = narrow.request("/slots").json()
        assert (slot["id"], slot["id_task"], slot["is_processing"]) == (0, number, True)
        assert slot["n_prompt_tokens"] == slot["n_prompt_tokens_processed"] == 6
        assert slot["next_token"]["n_decoded"] > 0
        full = narrow.request("/slots?fail_on_no_slot=1")
        assert (full.status, full.error["code"]) == (503, "no_slot_available")
    saved = narrow.request("/slots/0?action=save", {"filename": "x"})
    assert (saved.status, saved.error["code"]) == (400, "unsupported")


def test_a_conversation_becomes_a_prompt(server: Server) -> None:
    messages = [{"role": "user", "content": "Tell me a tale"}]
    prompt = server.request("/apply-template", {"messages": messages}).json()["prompt"]
    assert prompt == "<|begin|><|user|>Tell me a tale<|end|><|assistant|>"
    open_ = server.request("/apply-template", {"messages": messages, "add_generation_prompt": False}).json()["prompt"]
    assert prompt == f"{open_}<|assistant|>"
    begun = [*messages, {"role": "assistant", "content": "Once"}]
    assert server.request("/apply-template", {"messages": begun}).json()["prompt"] == f"{prompt}Once"
    answer = server.request("/completion", {"prompt": prompt, "temperature": 0, "n_predict": 8}).json()["content"]
    chat = {"messages": messages, "temperature": 0, "max_tokens": 8}
    assert server.request("/v1/chat/completions", chat).json()["choices"][0]["message"]["content"] == answer.lstrip()
    count = server.request("/v1/chat/completions", chat).json()["usage"]["prompt_tokens"]
    [begin, *_, last] = server.request("/tokenize", {"content": prompt}).json()["tokens"]
    rest, start = prompt.removeprefix("<|begin|>"), prompt.removesuffix("<|assistant|>")
    for same in (prompt, rest, [begin, rest], [start, last], [start.removeprefix("<|begin|>"), last]):
        answer = server.request("/completion", {"prompt": same, "n_predict": 1}).json()
        assert answer["tokens_evaluated"] == count, same  # with one bos
    bad = server.request("/apply-template", {"messages": [{"role": "alien", "content": "x"}]})
    assert bad.status == 400
    assert server.request("/apply-template", {"messages": []}).status == 400


def test_vectors_are_those_of_openais_api(server: Server) -> None:
    texts = ["Once upon a time", "The fox"]
    expected = [each["embedding"] for each in server.request("/v1/embeddings", {"input": texts}).json()["data"]]
    for path in ("/embedding", "/embeddings"):
        for body in ({"content": texts}, {"input": texts}, {"content": texts, "embd_normalize": 2}):
            found = server.request(path, body).json()
            assert [each["embedding"] for each in found] == [[vector] for vector in expected]
            assert [each["index"] for each in found] == [0, 1]
    [one] = server.request("/embedding", {"content": texts[0]}).json()
    assert one["embedding"] == [expected[0]]
    [plain] = server.request("/embedding", {"content": texts[0], "embd_normalize": -1}).json()
    [same] = server.request("/v1/embeddings", {"input": texts[:1], "normalize": False}).json()["data"]
    assert plain["embedding"] == [same["embedding"]]
    for invalid, words in (
        ({}, "give the text as content"),
        ({"content": "x", "input": "x"}, "give the text as content"),
        ({"content": "x", "embd_normalize": 0}, "embd_normalize=0 is not supported"),
        ({"content": "and " * 5000}, "2048"),
        ({"content": []}, "content is an empty list"),
    ):
        refused = server.request("/embedding", invalid)
        assert refused.status == 400
        assert words in refused.error["message"]


def test_tokens_of_a_text_in_both_forms(server: Server) -> None:
    plain = server.request("/tokenize", {"prompt": "Once upon", "add_special_tokens": False}).json()
    given = server.request("/tokenize", {"content": "Once upon"}).json()
    assert given["tokens"] == plain["tokens"]
    special = server.request("/tokenize", {"content": "Once upon", "add_special": True}).json()
    assert special["tokens"] == server.request("/tokenize", {"prompt": "Once upon"}).json()["tokens"]
    pieces = server.request("/tokenize", {"content": "Once á", "with_pieces": True, "parse_special": True}).json()
    assert (
        b"".join(
            each["piece"].encode() if isinstance(each["piece"], str) else bytes(each["piece"])
            for each in pieces["tokens"]
        )
        == "Once á".encode()
    )
    assert [195] in [each["piece"] for each in pieces["tokens"]]
    back = server.request("/detokenize", {"tokens": given["tokens"]}).json()
    assert (back["content"], back["prompt"]) == ("Once upon", "Once upon")
    for body in (
        {"content": "x", "prompt": "x"},
        {},
        {"prompt": "x", "with_pieces": True},
        {"prompt": "x", "add_special": True},
        {"content": "x", "parse_special": False},
    ):
        assert server.request("/tokenize", body).status == 400, body
