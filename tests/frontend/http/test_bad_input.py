"""Bad requests: each gets the right error in OpenAI's shape, and the server keeps serving."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from http_server import Reply, Server
from raw_http import RawConnection, post

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {"prompt": "Once upon", "max_tokens": 1}
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
DEEP = b"[" * 30_000 + b"]" * 30_000

# The body, the status, the field that is named (None: the body as a whole), and a part of the message.
BODIES: dict[str, tuple[bytes, int, str | None, str]] = {
    "nothing": (b"", 400, None, "empty"),
    "null": (b"null", 400, None, "object"),
    "a list": (b"[]", 400, None, "object"),
    "a string": (b'"x"', 400, None, "object"),
    "no JSON": (b"prompt=x", 400, None, "JSON"),
    "truncated": (b'{"prompt":"x"', 400, None, "JSON"),
    "cut off after an unknown field": (b'{"a":', 400, None, "JSON"),
    "cut off after a field of a field": (b'{"prompt":"x","stream_options":{"x":', 400, None, "JSON"),
    "two objects": (b'{"prompt":"x"}{}', 400, None, "JSON"),
    "single quotes": (b"{'prompt':'x'}", 400, None, "JSON"),
    "a byte order mark": (b'\xef\xbb\xbf{"prompt":"x"}', 400, None, "JSON"),
    "UTF-16": ('{"prompt":"x"}'.encode("utf-16"), 400, None, "JSON"),
    # "utf-8" or "UTF-8", as the release of msgspec writes it
    "bad UTF-8": (b'{"prompt":"\xff"}', 400, None, "-8"),
    "bad UTF-8 after an unsupported field": (b'{"store":false,"prompt":"\xff"}', 400, None, "-8"),
    "a lone surrogate": (b'{"prompt":"\\ud800"}', 400, None, "JSON"),
    "a bare NUL": (b'{"prompt":"\x00"}', 400, None, "JSON"),
    "NaN": (b'{"prompt":"x","temperature":NaN}', 400, None, "byte"),
    "Infinity": (b'{"prompt":"x","temperature":Infinity}', 400, None, "byte"),
    "1e999": (b'{"prompt":"x","temperature":1e999}', 400, "temperature", "out of range"),
    "a number of 5,000 digits": (b'{"prompt":"x","max_tokens":' + b"9" * 5000 + b"}", 400, "max_tokens", "range"),
    "a deep prompt": (b'{"prompt":' + DEEP + b"}", 400, "prompt[0][0]", "int"),
    "deep metadata": (b'{"prompt":"x","metadata":{"a":' + DEEP + b"}}", 400, None, "nested too deeply"),
    "deep after an unsupported field": (
        b'{"store":false,"prompt":"x","metadata":{"a":' + DEEP + b"}}",
        400,
        None,
        "nested",
    ),
    "malformed after an unsupported field": (b'{"store":false,"prompt":"x", bad}', 400, None, "JSON"),
}

# Fields added to a good prompt, and the field that the error names.
COMPLETION_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [[1, None]]}, "prompt[0][1]"),
    ({"prompt": ["x"] * 5000}, "prompt"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": 10**30}, "n"),
    ({"n": 5, "best_of": 2}, "best_of"),
    ({"best_of": 3, "stream": True}, "best_of"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"min_p": 5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 99}, "presence_penalty"),
    ({"frequency_penalty": [1]}, "frequency_penalty"),
    ({"seed": 10**30}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop[0]"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1e5}}, "logit_bias[1]"),
    ({"logprobs": 100}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"priority": 10**30}, "priority"),
    ({"cache_salt": "x" * 10**6}, "cache_salt"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"echo": "loud"}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"user": 5}, "user"),
    ({"use_beam_search": True, "n": 100_000}, "n"),
    ({"model": 5}, "model"),
    ({"Prompt": "x"}, "Prompt"),
    ({"a\u0000b": 1}, "a\u0000b"),
]

CHAT_FIELDS: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0]"),
    ({"messages": [{**USER, "role": 5}]}, "messages[0]"),
    ({"messages": [{**USER, "role": "alien"}]}, None),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [USER, {"role": "user", "content": [5]}]}, "messages[1].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
    ({"messages": [{**USER, "name": 5}]}, "messages[0].name"),
    ({"tools": 5}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ({"chat_template": "{{ messages[0].content }}"}, "chat_template"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": None, "max_completion_tokens": 99_999}, "max_completion_tokens"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"chat_template_content_format": "list"}, "chat_template_content_format"),
    ({"detokenize": False}, "detokenize"),
    ({"echo": True}, "echo"),
    ({"media_io_kwargs": {"video": {}}}, "media_io_kwargs"),
    ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options"),
    ({"truncation_side": "right"}, "truncation_side"),
    ({"request_id": "a\n"}, "request_id"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"functions": []}, "functions"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"prompt": "x"}, "prompt"),
]

OTHERS: list[tuple[str, dict[str, Any], str | None]] = [
    ("/tokenize", {}, None),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": [USER]}, None),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": [USER], "tools": [{**TOOL, "function": {"name": ""}}]}, "tools[0].function.name"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "x"}, "tokens"),
    ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [10**40]}, "tokens"),
    ("/v1/embeddings", {}, "input"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": 5}, "input"),
    ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format"),
    ("/v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions"),
    ("/v1/embeddings", {"input": "x", "messages": [USER]}, "messages"),
    ("/v1/embeddings", {"input": "x", "request_id": "a"}, "request_id"),
    ("/v1/responses", {"input": "x", "reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ("/v1/responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ("/v1/responses", {"input": "x", "max_output_tokens": 99_999}, "max_output_tokens"),
    ("/v1/responses", {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
]

HUGE = 10**400  # beyond the range of floats
WIDE = 2**63  # beyond the range of signed 64-bit integers

# A good request, and its integer fields; a name that begins with "-" is tested with a negative number.
INTEGERS: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        COMPLETIONS,
        {"prompt": "x"},
        ["max_tokens", "top_k", "seed", "min_tokens", "prompt_logprobs", "logprobs", "n", "best_of", "priority"],
    ),
    (
        COMPLETIONS,
        {"prompt": "y"},
        ["-max_tokens", "-top_k", "-min_tokens", "-n", "-best_of", "-priority", "-truncate_prompt_tokens"],
    ),
    (CHAT, {"messages": [USER], "logprobs": True}, ["max_tokens", "max_completion_tokens", "top_logprobs", "n"]),
    ("/v1/responses", {"input": "x"}, ["max_output_tokens", "top_k", "seed", "priority", "top_logprobs"]),
    ("/v1/embeddings", {"input": "x"}, ["dimensions", "priority", "-dimensions", "-truncate_prompt_tokens"]),
]

HEADERS: list[tuple[dict[str, str], int, str | None]] = [
    ({"X-Request-Timeout": "soon"}, 400, "X-Request-Timeout"),
    ({"X-Request-Timeout": "-1"}, 400, "X-Request-Timeout"),
    ({"X-Request-Timeout": "nan"}, 400, "X-Request-Timeout"),
    ({"X-Request-Timeout": "inf"}, 400, "X-Request-Timeout"),
    ({"Content-Type": "text/plain"}, 415, None),
    ({"Content-Type": "application/x-www-form-urlencoded"}, 415, None),
    ({"Content-Type": ""}, 415, None),
    ({"Content-Encoding": "gzip"}, 415, None),
]


def short(value: Any) -> str:
    """Return the name of a case."""
    return str(value)[:40]


@pytest.fixture(autouse=True)
def keeps_serving(server: Server) -> Any:
    """Send a good request after each bad one."""
    yield
    assert server.request(COMPLETIONS, GOOD).status == 200


def check(reply: Reply, status: int, param: str | None, part: str = "") -> None:
    assert reply.status == status, reply.body
    error = reply.error
    assert error["param"] == param, error
    assert part in error["message"], error
    assert error["type"] == {404: "not_found_error"}.get(status, "invalid_request_error")
    if param is not None:
        assert param in error["message"], error


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_not_a_json_object_is_rejected(server: Server, name: str) -> None:
    body, status, param, part = BODIES[name]
    check(server.request(COMPLETIONS, body), status, param, part)


@pytest.mark.parametrize(("fields", "param"), COMPLETION_FIELDS, ids=short)
def test_a_completion_with_a_bad_field_is_rejected(server: Server, fields: dict[str, Any], param: str) -> None:
    check(server.request(COMPLETIONS, {**GOOD, **fields}), 400, param)


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        ("", "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ([-1], "token id -1"),
        ([10**6], "token id 1000000"),
        ([10**22], "token id 1"),
    ],
    ids=short,
)
def test_a_prompt_that_cant_be_served_is_rejected(server: Server, prompt: Any, part: str) -> None:
    check(server.request(COMPLETIONS, {**GOOD, "prompt": prompt}), 400, None, part)


@pytest.mark.parametrize(("fields", "param"), CHAT_FIELDS, ids=short)
def test_a_chat_with_a_bad_field_is_rejected(server: Server, fields: dict[str, Any], param: str | None) -> None:
    check(server.request(CHAT, {"messages": [USER], "max_tokens": 1, **fields}), 400, param)


@pytest.mark.parametrize(("path", "body", "param"), OTHERS, ids=short)
def test_the_other_endpoints_reject_bad_fields_as_well(
    server: Server, path: str, body: dict[str, Any], param: str | None
) -> None:
    check(server.request(path, body), 400, param)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/v1/embeddings"])
def test_every_endpoint_rejects_malformed_bodies(server: Server, path: str) -> None:
    check(server.request(path, b'{"'), 400, None, "JSON")
    check(server.request(path, {"mystery": 1}), 400, "mystery", "not a known field")
    check(server.request(path, b"[" * 30_000), 400, None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, GOOD),
        (CHAT, {"messages": [USER]}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/embeddings", {"input": "x"}),
    ],
)
def test_an_unknown_model_is_not_found(server: Server, path: str, body: dict[str, Any]) -> None:
    for name in ("gpt-5", "", "\u0000", "../demo", "x" * 100_000):
        check(server.request(path, {**body, "model": name}), 404, "model")


@pytest.mark.parametrize("number", [HUGE, WIDE], ids=["huge", "wide"])
@pytest.mark.parametrize(("path", "good", "names"), INTEGERS, ids=short)
def test_an_integer_that_is_too_large_is_rejected(
    server: Server, path: str, good: dict[str, Any], names: list[str], number: int
) -> None:
    for name in names:
        field, value = name.removeprefix("-"), -number - 1 if name.startswith("-") else number
        reply = server.request(path, {**good, field: value})
        assert (reply.status, reply.error["param"]) == (400, field), reply.error


@pytest.mark.parametrize("number", [HUGE, WIDE, 2**31, 2**32, 2**62], ids=short)
def test_large_numbers_are_accepted_or_rejected(server: Server, number: int) -> None:
    """No number causes a server error; one that can only mean "no limit" may be accepted."""
    for fields in (
        {"stop_token_ids": [number]},
        {"allowed_token_ids": [-number]},
        {"logit_bias": {str(number): 1}},
        {"logit_bias": {"1": number}},
        {"prompt": [number]},
        {"temperature": number},
        {"top_k": number},
        {"seed": number},
        {"seed": -number},
        {"truncate_prompt_tokens": number},
    ):
        reply = server.request(COMPLETIONS, {**GOOD, **fields})
        assert reply.status in (200, 400), (fields.keys(), reply.body[:300])
    for fields in ({"top_k": number}, {"top_k": -number}, {"max_tokens": number}, {"max_tokens": -number}):
        reply = server.request("/v1/messages", {"messages": [USER], "max_tokens": 1, **fields})
        assert reply.status == 400 or max(fields.values()) > 0, reply.body[:300]
        assert reply.status in (200, 400), (fields.keys(), reply.body[:300])


@pytest.mark.parametrize("key", ["messages", "tools", "add_generation_prompt", "continue_final_message", "self"])
def test_a_reserved_variable_of_the_template_is_rejected(server: Server, key: str) -> None:
    for path, body in (
        (CHAT, {"messages": [USER]}),
        ("/tokenize", {"messages": [USER]}),
        ("/v1/responses", {"input": "x"}),
    ):
        check(server.request(path, {**body, "chat_template_kwargs": {key: 1}}), 400, f"chat_template_kwargs.{key}")


LONG = "x" * 100_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": LONG}, "prompt"),
        (COMPLETIONS, {"prompt": LONG, "stream": True}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 99_999}, "max_tokens"),
        (CHAT, {"messages": [{**USER, "content": LONG}]}, "messages"),
        (CHAT, {"messages": [{**USER, "content": LONG}], "stream": True}, "messages"),
        (CHAT, {"messages": [USER], "max_completion_tokens": 99_999}, "max_completion_tokens"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/responses", {"input": LONG, "stream": True}, "input"),
        ("/v1/embeddings", {"input": LONG}, "input"),
    ],
    ids=short,
)
def test_exceeding_the_context_has_openais_code_and_message(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    reply = server.request(path, body)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "context_length_exceeded", param)
    assert re.search(r"this model's maximum context length is \d+ tokens", reply.error["message"])


def test_null_is_the_same_as_leaving_a_field_out(server: Server) -> None:
    nothing = {"mystery": None, "detokenize": None, "request_id": None, "logit_bias": {"1": -100}}
    assert server.request(COMPLETIONS, {**GOOD, **nothing}).status == 200
    options = dict.fromkeys(["add_special_tokens", "add_generation_prompt", "continue_final_message", "mystery"])
    for given in ({"prompt": "x"}, {"messages": [USER]}):
        answer = server.request("/tokenize", {**given, **options}).json()
        assert answer["tokens"] == server.request("/tokenize", given).json()["tokens"]
    reply = server.request("/v1/messages", {"messages": [USER], "max_tokens": 1, "mystery": None})
    assert reply.status == 200, reply.body


FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
ANTHROPIC_TOOL = {"name": "f", "input_schema": {"type": "object"}}
NONE = {"tool_choice": {"type": "none"}}  # the demo model calls no tools by itself


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {**GOOD, "stream": True, "stream_options": {"mystery": None}}),
        (COMPLETIONS, {**GOOD, "structured_outputs": {"regex": "a", "structural_tag": None, "mystery": None}}),
        (COMPLETIONS, {**GOOD, "structured_outputs": {"regex": "a", "disable_additional_properties": False}}),
        (COMPLETIONS, {**GOOD, "response_format": {"type": "text", "json_schema": None}}),
        (CHAT, {"messages": [USER], "max_tokens": 1, "tools": [{**TOOL, "mystery": None}], "tool_choice": "none"}),
        ("/v1/messages", {"thinking": {"type": "disabled", "mystery": None}}),
        ("/v1/messages", {"output_config": {"effort": "low", "format": None, "task_budget": None}}),
        ("/v1/messages", {"tools": [{**ANTHROPIC_TOOL, "mystery": None, "defer_loading": None}], **NONE}),
        ("/v1/messages", {"tools": [{**ANTHROPIC_TOOL, "defer_loading": False, "input_examples": []}], **NONE}),
        ("/v1/messages", {"tools": [{**ANTHROPIC_TOOL, "allowed_callers": ["direct"]}], **NONE}),
        ("/v1/messages", {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "none", "mystery": None}}),
        ("/v1/responses", {"text": {"format": {"type": "text", "mystery": None}, "mystery": None}}),
        ("/v1/responses", {"tools": [{**FLAT, "output_schema": None, "mystery": None}], "tool_choice": "none"}),
        ("/v1/responses", {"tools": [{**FLAT, "allowed_callers": ["direct"], "async": False}], "tool_choice": "none"}),
    ],
    ids=short,
)
def test_neutral_values_are_accepted_within_fields(server: Server, path: str, body: dict[str, Any]) -> None:
    own: dict[str, Any] = {"/v1/messages": {"messages": [USER], "max_tokens": 1}, "/v1/responses": {"input": "x"}}
    reply = server.request(path, {**own.get(path, {}), **body})
    assert reply.status == 200, reply.body


def test_nulls_within_a_schema_are_kept(server: Server) -> None:
    for schema in ({"const": None}, {"enum": [None]}, {"anyOf": [{"const": None, "default": None}]}):
        asked = {"json": schema, "regex": None, "mystery": None}
        body = {"prompt": "x", "max_tokens": 20, "structured_outputs": asked}
        assert server.request(COMPLETIONS, body).json()["choices"][0]["text"].strip() == "null"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            COMPLETIONS,
            {"structured_outputs": {"regex": "a", "mystery": 0, "other": None}},
            "structured_outputs.mystery",
        ),
        (
            COMPLETIONS,
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": None, "mystery": None}}},
            "response_format.json_schema.name",
        ),
        ("/v1/responses", {"tools": [{**FLAT, "defer_loading": True}]}, "tools[0].defer_loading"),
        ("/v1/responses", {"tools": [FLAT, {**FLAT, "mystery": 1}]}, "tools[1]"),
    ],
    ids=short,
)
def test_other_values_within_fields_are_rejected(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    own: dict[str, Any] = {COMPLETIONS: GOOD, CHAT: {"messages": [USER]}, "/v1/responses": {"input": "x"}}
    check(server.request(path, {**own[path], **body}), 400, param)


def test_many_nulls_are_dropped_at_once(server: Server) -> None:
    nothing = {f"x{number}": None for number in range(10_000)}
    asked = {"regex": "a", **nothing}
    assert server.request(COMPLETIONS, {**GOOD, **nothing, "structured_outputs": asked}).status == 200


@pytest.mark.parametrize(
    ("path", "body", "written"),
    [
        (COMPLETIONS, {"prompt": "x", "seed": 42, "max_tokens": 10}, b'{"prompt":"x","seed":42.0,"max_tokens":1e1}'),
        (COMPLETIONS, {"prompt": [[5, 6], [7]], "seed": 1}, b'{"prompt":[[5.0,6],[7.00]],"seed":1,"mystery":null}'),
        (COMPLETIONS, {"prompt": "x", "top_k": 0, "seed": 3}, b'{"prompt":"x","top_k":-0.0,"seed":0.3e1}'),
        (
            "/completion",
            {"prompt": [5, 6], "seed": 3, "n_predict": 4, "logit_bias": [[9, -5]]},
            b'{"prompt":[5.0,6.0],"seed":3.0,"n_predict":4.0,"logit_bias":[[9.0,-5]]}',
        ),
        (
            "/api/generate",
            {"prompt": "x", "stream": False, "options": {"seed": 3, "num_predict": 4}},
            b'{"prompt":"x","stream":false,"options":{"seed":3.0,"num_predict":4e0}}',
        ),
    ],
    ids=short,
)
def test_integers_may_be_written_with_a_fraction_or_an_exponent(
    server: Server, path: str, body: dict[str, Any], written: bytes
) -> None:
    def text_of(reply: Any) -> list[str]:
        assert reply.status == 200, reply.body
        answer = reply.json()
        choices = answer.get("choices", [{"text": answer.get("content", answer.get("response"))}])
        return [choice["text"] for choice in choices]

    assert text_of(server.request(path, written)) == text_of(server.request(path, body))


@pytest.mark.parametrize("number", [b"1.5", b"1e-1", b"1e17", b"1e400", b"-1.5e0"])
def test_other_numbers_are_no_integers(server: Server, number: bytes) -> None:
    check(server.request(COMPLETIONS, b'{"prompt":"x","top_k":' + number + b"}"), 400, "top_k")


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (COMPLETIONS, {"prompt": ["a", "", "b"]}, "prompt[1]", "empty"),
        (COMPLETIONS, {"prompt": ["a", "b c " * 5000]}, "prompt[1]", "maximum context length"),
        (COMPLETIONS, {"prompt": [[1], [2], [10**7]]}, "prompt[2]", "outside the vocabulary"),
        ("/completion", {"prompt": ["a", ""]}, "prompt[1]", "empty"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]", "empty"),
        ("/v1/embeddings", {"input": [[1], [10**7]]}, "input[1]", "outside the vocabulary"),
        ("/v1/embeddings", {"input": ["a", "b"], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "leaves no"),
        ("/pooling", {"input": ["a", "b c " * 5000]}, "input[1]", "maximum context length"),
        ("/embedding", {"content": ["a", "b", ""]}, "content[2]", "empty"),
        ("/rerank", {"query": "a", "documents": ["a", {"text": ""}]}, "documents[1]", "empty"),
        ("/rerank", {"query": "", "documents": ["a", "b"]}, "query", "empty"),
        ("/rerank", {"query": "a", "documents": ["a", "b c " * 5000]}, "documents[1]", "maximum context length"),
        ("/score", {"queries": "a", "documents": ["a", ""]}, "documents[1]", "empty"),
        ("/score", {"text_1": ["a", ""], "text_2": ["a", "b"]}, "text_1[1]", "empty"),
        ("/score", {"text_1": "a", "data_2": "b c " * 5000}, "data_2", "maximum context length"),
    ],
    ids=short,
)
def test_a_text_at_fault_is_named_by_its_place(
    server: Server, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    reply = server.request(path, body)
    check(reply, 400, param)
    assert words in reply.error["message"]
    assert param.endswith("tokens") or "[" not in param or reply.error["message"].startswith(param)


def test_unsupported_fields_may_have_neutral_values(server: Server) -> None:
    nothing = {"echo": False, "media_io_kwargs": {}, "prompt_cache_options": {}, "truncation_side": "left"}
    assert server.request(CHAT, {"messages": [USER], "max_tokens": 1, **nothing}).status == 200


def test_a_client_may_choose_the_id_of_the_answer(server: Server) -> None:
    for path, body, answer_id in (
        (COMPLETIONS, GOOD, "cmpl-mine"),
        (CHAT, {"messages": [USER], "max_tokens": 1}, "chatcmpl-mine"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1}, "resp_mine"),
    ):
        assert server.request(path, {**body, "request_id": "mine"}).json()["id"] == answer_id


@pytest.mark.parametrize(("headers", "status", "param"), HEADERS, ids=str)
def test_bad_headers_are_rejected(server: Server, headers: dict[str, str], status: int, param: str | None) -> None:
    check(server.request(COMPLETIONS, GOOD, headers=headers), status, param)


def test_unusual_input_is_served(server: Server) -> None:
    for body in (
        {**GOOD, "prompt": "a\u0000b"},
        {**GOOD, "stop": ["x"] * 256},
        {**GOOD, "metadata": {"a": [[[[[]]]]]}},
        {**GOOD, "logit_bias": {"1": -100}, "user": "\U0001f600"},
    ):
        assert server.request(COMPLETIONS, body).status == 200
    twice = server.request(COMPLETIONS, b'{"prompt":"x","max_tokens":5,"max_tokens":1}')
    assert twice.json()["usage"]["completion_tokens"] == 1  # the last one counts, as in JSON parsers
    assert server.request(COMPLETIONS, GOOD, headers={"traceparent": "00-zz", "tracestate": "=,="}).status == 200


def test_a_request_id_that_could_forge_a_log_line_is_replaced(server: Server) -> None:
    for given in ("a b", "x" * 129, "\xe9", "", "a\tb"):
        reply = server.request("/version", headers={"X-Request-Id": given})
        assert reply.headers["x-request-id"] not in ("", given)
    assert server.request("/version", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    with RawConnection(server.url) as connection:
        request = post(COMPLETIONS, GOOD, "X-Request-Id: a\r\nX-Other: b")
        reply = connection.send(request).reply()
        assert reply.status == 200
        assert reply.headers["x-request-id"] == "a"
        assert "x-other" not in reply.headers


def test_a_stream_that_cant_begin_gets_an_error_status(server: Server) -> None:
    reply = server.request(COMPLETIONS, {**GOOD, "stream": True, "max_tokens": 99_999})
    assert reply.headers["content-type"] == "application/json"
    assert json.loads(reply.body)["error"]["param"] == "max_tokens"
