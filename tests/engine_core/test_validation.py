"""Rejected requests, and their errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine_core.decoding import decoding_type
from quire.engine_core.validation import RejectedError
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import EngineCoreRequest, SamplingParams, StructuredOutputs

LIMITS = EngineShape(
    vocab_size=1000, max_model_len=4096, max_num_seqs=8, max_num_batched_tokens=64, block_size=32, num_pages=500
)


def refusal(prompt: list[int] | None = None, limits: EngineShape = LIMITS, **fields: Any) -> str | None:
    """Return the error of a rejected request, None if it is accepted."""
    of_request = {name: fields.pop(name) for name in ("eos_token_ids", "priority", "cache_salt") if name in fields}
    prompt = [1, 2, 3] if prompt is None else prompt
    try:
        message = EngineCoreRequest("a", prompt, SamplingParams(**fields), **of_request)
        decoding_type(message).check(message, limits)
    except RejectedError as error:
        return str(error)
    return None


def test_an_ordinary_request_passes() -> None:
    assert refusal() is None
    assert refusal(
        temperature=0,
        top_k=40,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias={5: -100.0},
        allowed_token_ids=[5, 6, 7],
        bad_words_token_ids=[[5], [6, 7]],
        stop_token_ids=[7],
        eos_token_ids=[0],
        min_tokens=2,
        max_tokens=10,
        logprobs=20,
        prompt_logprobs=0,
        seed=2**63 - 1,
    ) is None  # fmt: skip


def test_max_tokens_beyond_the_context() -> None:
    assert refusal([1] * 3000, max_tokens=5000) == (
        "max_tokens=5000 with a prompt of 3000 tokens is too many, as this model's maximum context length is 4096 "
        "tokens; lower max_tokens to 1096 or less"
    )
    assert refusal([1] * 3000, max_tokens=1097) is not None
    assert refusal([1] * 3000, max_tokens=1096) is None
    assert refusal([1] * 4095, max_tokens=None) is None


@pytest.mark.parametrize("max_tokens", [0, -1, -(2**62)])
def test_max_tokens_must_ask_for_something(max_tokens: int) -> None:
    assert refusal(max_tokens=max_tokens) == f"max_tokens={max_tokens} asks for no answer; it must be at least 1"


def test_an_empty_prompt() -> None:
    assert refusal([]) == "the prompt is empty; give at least one token"


@pytest.mark.parametrize("max_tokens", [1, None])
def test_a_prompt_as_long_as_the_context(max_tokens: int | None) -> None:
    assert refusal([1] * 4096, max_tokens=max_tokens) == (
        "a prompt of 4096 tokens leaves no room for an answer, as this model's maximum context length is 4096 tokens; "
        "shorten it to 4095 tokens or fewer"
    )


def test_a_prompt_larger_than_the_kv_pool() -> None:
    small = EngineShape(1000, 4096, 8, 64, block_size=32, num_pages=3)
    assert refusal([1] * 95, small) is None
    assert "the engine's 3 KV pages hold 96 tokens; shorten it to 95" in (refusal([1] * 96, small) or "")


@pytest.mark.parametrize(
    ("prompt", "wrong", "position"), [([1, -1], -1, 1), ([1000], 1000, 0), ([0, 999, 2**40], 2**40, 2)]
)
def test_prompt_token_ids_out_of_range(prompt: list[int], wrong: int, position: int) -> None:
    assert refusal(prompt) == (
        f"prompt_token_ids has the token id {wrong} at position {position}; the model's vocabulary allows 0 to 999; "
        "check that the tokenizer belongs to the model"
    )


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"eos_token_ids": [1000]}, "eos_token_ids"),
        ({"stop_token_ids": [1, -2]}, "stop_token_ids"),
        ({"allowed_token_ids": [1000]}, "allowed_token_ids"),
        ({"bad_words_token_ids": [[1], [2, 1000]]}, "bad_words_token_ids"),
        ({"logit_bias": {1000: 1.0}}, "logit_bias"),
    ],
)
def test_other_token_ids_out_of_range(fields: dict[str, Any], name: str) -> None:
    assert (refusal(**fields) or "").startswith(f"{name} has the token id ")


NUMBERS = {
    "temperature": [-0.1, math.inf, 1e39],
    "top_p": [-0.1, -0.5, 1.01, math.inf],
    "min_p": [-0.01, 1.5],
    "repetition_penalty": [0.0, -1.0, math.inf],
    "presence_penalty": [-2.1, 2.1, -math.inf],
    "frequency_penalty": [-2.1, 2.1, math.inf],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, v) for name, values in NUMBERS.items() for v in [*values, math.nan]]
)
def test_numbers_out_of_range(name: str, value: float) -> None:
    fields: dict[str, Any] = {name: value}
    assert (refusal(**fields) or "").startswith(f"{name}={value!r} is out of range; it must be ")


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", -2), ("seed", -1), ("seed", 2**63), ("logprobs", -1), ("logprobs", 21), ("prompt_logprobs", 21)],
)
def test_whole_numbers_out_of_range(name: str, value: int) -> None:
    fields: dict[str, Any] = {name: value}
    assert (refusal(**fields) or "").startswith(f"{name}={value} is out of range; it must be ")


@pytest.mark.parametrize("value", [math.nan, math.inf, 100.5, -101.0])
def test_logit_bias_out_of_range(value: float) -> None:
    assert refusal(logit_bias={7: value}) == f"logit_bias of token 7 is {value!r}; it must be from -100 to 100"


@pytest.mark.parametrize("min_tokens", [-1, 17])
def test_min_tokens_out_of_range(min_tokens: int) -> None:
    assert refusal(min_tokens=min_tokens) == (
        f"min_tokens={min_tokens} is out of range; it must be from 0 to max_tokens, 16"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": []},
        {"allowed_token_ids": [5, 6], "bad_words_token_ids": [[5], [6]]},
        {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1},
        {"allowed_token_ids": [5], "eos_token_ids": [5], "min_tokens": 1},
    ],
)
def test_some_token_must_be_left_to_sample(fields: dict[str, Any]) -> None:
    assert "allow" in (refusal(**fields) or "")
    assert refusal(allowed_token_ids=[5], eos_token_ids=[5], min_tokens=1, ignore_eos=True) is None
    assert refusal(allowed_token_ids=[5], eos_token_ids=[5]) is None


def test_an_empty_bad_word() -> None:
    assert "empty entry" in (refusal(bad_words_token_ids=[[1], []]) or "")


def test_fields_that_the_engine_would_ignore_are_rejected() -> None:
    assert refusal(n=2) == "n=2: the engine gives one answer a request; send a request for each of them"
    assert "leave it at 0" in (refusal(priority=1) or "")
    assert refusal(stop=["a", "b"]) == (
        "stop=['a', 'b']: the engine sees token ids and no text; look for stop strings in what it answers, "
        "or use stop_token_ids"
    )
    assert refusal(bad_words=["a"]) == (
        "bad_words=['a']: the engine sees token ids and no text; send their token ids as bad_words_token_ids"
    )
    assert refusal(stop=[], bad_words=[]) is None


@given(
    prompt=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(),
            "top_p": st.floats(),
            "top_k": st.integers(-(2**63), 2**63 - 1),
            "max_tokens": st.none() | st.integers(-(2**63), 2**63 - 1),
            "min_tokens": st.integers(-(2**63), 2**63 - 1),
            "logit_bias": st.dictionaries(st.integers(-2, 1002), st.floats(), max_size=3),
            "allowed_token_ids": st.lists(st.integers(-2, 1002), max_size=3),
            "bad_words_token_ids": st.lists(st.lists(st.integers(-2, 1002), max_size=2), max_size=3),
        },
    ),
)
def test_any_request_passes_or_is_rejected(prompt: list[int], fields: dict[str, Any]) -> None:
    """A rejection is always a RejectedError with a text, never another exception."""
    assert refusal(prompt, **fields) != ""


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        (StructuredOutputs(), "asks for nothing"),
        (StructuredOutputs(regex="a", choice=["b"]), "asks for regex and choice"),
        (StructuredOutputs(choice=[]), "allows no text"),
        (StructuredOutputs(grammar="x" * 2_000_000), "2000000 characters"),
    ],
)
def test_structured_outputs_of_no_use(structured: StructuredOutputs, words: str) -> None:
    assert words in (refusal(structured_outputs=structured) or "")
    assert "beam search" in (refusal(structured_outputs=structured, beam_width=2, temperature=0.0) or "")


def test_structured_outputs_of_use() -> None:
    for structured in (StructuredOutputs(regex="a"), StructuredOutputs(json={"type": "null"}, regex=None)):
        assert refusal(structured_outputs=structured) is None


def test_a_salt_of_an_adapter_is_not_given_by_clients() -> None:
    assert "has a NUL character" in (refusal(cache_salt="\0" + "0" * 64) or "")
    assert refusal(cache_salt="0" * 64) is None
