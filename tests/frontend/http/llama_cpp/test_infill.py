"""`/infill`: the text between two others, with the prompts that models were trained with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from demo_copies import infill_model
from http_server import Server

BEGIN, PREFIX, SUFFIX, MIDDLE = range(4)
PAD, REPOSITORY, FILE = 2045, 2046, 2047
GREEDY: Any = {"temperature": 0, "n_predict": 12}
BEFORE, AFTER = "Once upon a time there", " lived in the forest."


@pytest.fixture(scope="module")
def filler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a model with tokens for filling in, and none for files."""
    with Server.start(str(infill_model(tmp_path_factory.mktemp("plain") / "model", with_files=False))) as server:
        yield server


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a model with tokens for files too."""
    with Server.start(str(infill_model(tmp_path_factory.mktemp("files") / "model", with_files=True))) as server:
        yield server


def ids(server: Server, text: str) -> list[int]:
    return list(server.request("/tokenize", {"content": text}).json()["tokens"])


def infill(server: Server, **fields: Any) -> Any:
    reply = server.request("/infill", {"input_prefix": BEFORE, "input_suffix": AFTER, **GREEDY, **fields})
    assert reply.status == 200, reply.body
    return reply.json()


def completion(server: Server, prompt: list[int]) -> Any:
    """Return the answer to a prompt; it gives the prompt as text too."""
    return server.request("/completion", {"prompt": prompt, **GREEDY}).json()


def check(server: Server, answer: Any, prompt: list[int]) -> None:
    expected = completion(server, prompt)
    assert answer["prompt"] == expected["prompt"]
    assert answer["tokens_evaluated"] == len(prompt)
    assert answer["content"] == expected["content"]


def test_a_prompt_has_the_marks_of_the_model(filler: Server) -> None:
    before, after = ids(filler, BEFORE), ids(filler, AFTER)
    check(filler, infill(filler), [BEGIN, PREFIX, *before, SUFFIX, *after, MIDDLE])
    begun = [BEGIN, PREFIX, *before, *ids(filler, " was"), SUFFIX, *after, MIDDLE]
    check(filler, infill(filler, prompt=" was"), begun)


def test_other_texts_come_first(filler: Server, coder: Server) -> None:
    extra = [{"filename": "fox.txt", "text": "The fox."}, {"text": "The crow."}]
    snippet = "\n\n--- snippet ---\n\n"
    texts = [token for each in extra for text in (snippet, each["text"]) for token in ids(filler, text)]
    prompt = [PREFIX, *ids(filler, BEFORE), SUFFIX, *ids(filler, AFTER), MIDDLE]
    check(filler, infill(filler, input_extra=extra), [BEGIN, *texts, *prompt])
    files = [
        *(REPOSITORY, *ids(coder, "myproject\n")),
        *(FILE, *ids(coder, "fox.txt\n"), *ids(coder, "The fox.")),
        *(FILE, *ids(coder, "tmp\n"), *ids(coder, "The crow.")),
        *(FILE, *ids(coder, "filename\n")),
    ]
    prompt = [PREFIX, *ids(coder, BEFORE), SUFFIX, *ids(coder, AFTER), MIDDLE]
    check(coder, infill(coder, input_extra=extra), [BEGIN, *files, *prompt])


def test_what_does_not_fit_is_cut(filler: Server) -> None:
    many = {"input_prefix": "x y z " * 2000, "input_suffix": "a b c " * 2000}
    answer = infill(filler, **many, input_extra=[{"text": "The fox. " * 500}])
    assert answer["tokens_evaluated"] == 2048 - 12
    prompt = answer["prompt"]
    assert prompt.startswith("<|begin|><|fim_prefix|>")  # no room for the other text
    before, after = prompt.removesuffix("<|fim_middle|>").split("<|fim_suffix|>")
    assert after.startswith("a b c")
    share = len(ids(filler, after)) / 2048
    assert 0.2 < share < 0.27
    assert before.endswith("x y z ")
    short = infill(filler, input_extra=[{"text": "The fox. " * 2000}])
    assert short["tokens_evaluated"] == 2048 - 12
    assert BEFORE in short["prompt"]
    assert AFTER in short["prompt"]
    endless = infill(filler, **many, n_predict=-1)
    assert endless["tokens_evaluated"] == 2048 - 512


def test_a_mark_of_another_file_ends_the_answer(coder: Server) -> None:
    for mark in (PAD, REPOSITORY, FILE):
        answer = infill(coder, logit_bias=[[mark, 100]])
        assert (answer["content"], answer["stop_type"]) == ("", "eos")


def test_the_requests_of_editors_are_served(filler: Server) -> None:
    """Those of llama.vim and llama.vscode, which also send texts ahead so that they are cached."""
    fields: Any = {
        "id_slot": 0,
        "input_extra": [{"text": "The fox.", "time": None}],
        "prompt": "",
        "n_predict": 128,
        "stop": [],
        "n_indent": 0,
        "top_k": 40,
        "top_p": 0.9,
        "samplers": ["top_k", "top_p", "infill"],
        "stream": False,
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
        "response_fields": ["content", "timings/prompt_n", "timings/predicted_ms", "truncated", "tokens_cached"],
    }
    answer = infill(filler, **fields)
    assert set(answer) == {"content", "timings/prompt_n", "timings/predicted_ms", "truncated", "tokens_cached"}
    ahead = {**fields, "n_predict": 0, "temperature": 0.0, "samplers": [], "response_fields": [""]}
    assert infill(filler, **ahead, input_prefix="", input_suffix="") == {}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_extra": [{"filename": "x"}]}, "input_extra[0].text is missing"),
        ({"input_extra": [{"text": 1}]}, "input_extra[0].text"),
        ({"prompt": "and " * 3000}, "leave no room in the context of 2048"),
        ({"prompt": "x" * (2 << 20)}, "can be tokenized"),
        ({"nonsense": 1}, "nonsense is not a known field"),
    ],
)
def test_what_cannot_be_filled_in_is_named(filler: Server, fields: dict[str, Any], words: str) -> None:
    reply = filler.request("/infill", {"input_prefix": BEFORE, "input_suffix": AFTER, **fields})
    assert reply.status == 400
    assert words in reply.error["message"]


def test_a_model_that_was_not_trained_for_it_says_so(server: Server) -> None:
    reply = server.request("/infill", {"input_prefix": BEFORE, "input_suffix": AFTER})
    assert (reply.status, reply.error["code"]) == (400, "unsupported")
    assert "its vocabulary has no token for the prefix, the suffix, the middle" in reply.error["message"]
