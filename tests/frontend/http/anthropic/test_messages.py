"""`/v1/messages` through Anthropic's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic, AuthenticationError, BadRequestError, InternalServerError, NotFoundError
from anthropic.types import Message, RawMessageStreamEvent
from http_server import Server, events_of
from openai import OpenAI
from pydantic import TypeAdapter

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TALE: Any = [{"role": "user", "content": "Tell me a tale"}]
GREEDY: Any = {"model": "quire-demo", "max_tokens": 12, "extra_body": {"temperature": 0}}
BODY: Any = {"model": "quire-demo", "max_tokens": 12, "temperature": 0, "messages": TALE}


@pytest.fixture(scope="module")
def anthropic(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def text_of(message: Message) -> str:
    [block] = message.content
    assert block.type == "text"
    return block.text


def test_a_message_has_the_text_of_a_chat(anthropic: Anthropic, openai: OpenAI) -> None:
    message = anthropic.messages.create(messages=TALE, **GREEDY)
    chat = openai.chat.completions.create(model="quire-demo", messages=TALE, temperature=0, max_tokens=12)
    assert text_of(message) == chat.choices[0].message.content
    assert (message.role, message.model, message.type) == ("assistant", "quire-demo", "message")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert chat.usage is not None
    usage = message.usage
    assert (usage.input_tokens or 0) + (usage.cache_read_input_tokens or 0) == chat.usage.prompt_tokens
    assert usage.output_tokens == 12
    assert message.id.startswith("msg_")


def test_a_stream_adds_up_to_the_whole(anthropic: Anthropic, server: Server) -> None:
    whole = anthropic.messages.create(messages=TALE, **GREEDY)
    with anthropic.messages.stream(messages=TALE, **GREEDY) as stream:
        assert "".join(stream.text_stream) == text_of(whole)
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert text_of(final) == text_of(whole)
    reply = server.request("/v1/messages", {**BODY, "stream": True})
    events = events_of(reply.body)
    for event in events:
        if event["type"] != "ping":
            EVENT.validate_python(event)
    names = [line.removeprefix("event: ") for line in reply.body.decode().split("\n") if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    assert list(dict.fromkeys(names)) == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_a_stop_sequence_is_named(anthropic: Anthropic) -> None:
    arguments: Any = {**GREEDY, "messages": TALE, "max_tokens": 50, "stop_sequences": ["no such", " Fox"]}
    whole = anthropic.messages.create(**arguments)
    with anthropic.messages.stream(**arguments) as stream:
        final = stream.get_final_message()
    for message in (whole, final):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " Fox")
        assert " Fox" not in text_of(message)


def test_an_answer_ends_with_the_context(server: Server) -> None:
    long = [{"role": "user", "content": "and " * 2030}]
    answer = server.request("/v1/messages", {**BODY, "messages": long, "max_tokens": 32000}).json()
    assert answer["stop_reason"] in {"model_context_window_exceeded", "end_turn"}
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] <= 2048
    too_long = server.request("/v1/messages", {**BODY, "messages": [{"role": "user", "content": "and " * 3000}]})
    assert (too_long.status, too_long.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_prefilled_answer_is_continued(anthropic: Anthropic) -> None:
    whole = text_of(anthropic.messages.create(messages=TALE, **GREEDY))
    begun = whole[: whole.index(" Fox")]
    rest = anthropic.messages.create(messages=[*TALE, {"role": "assistant", "content": begun}], **GREEDY)
    assert text_of(rest).startswith(whole[len(begun) :])


def test_a_conversation_has_the_prompt_of_a_chat(anthropic: Anthropic, openai: OpenAI) -> None:
    first = anthropic.messages.create(messages=TALE, **GREEDY)
    blocks: Any = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Tell me a tale", "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "Go on"},
        {"role": "user", "content": [{"type": "text", "text": "please"}]},
    ]
    system: Any = [{"type": "text", "text": "You tell tales.", "cache_control": {"type": "ephemeral"}}]
    chat: Any = [
        {"role": "system", "content": "You tell tales."},
        *TALE,
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "Go on\nplease"},
    ]
    second = anthropic.messages.create(messages=blocks, system=system, **GREEDY)
    told = openai.chat.completions.create(model="quire-demo", messages=chat, temperature=0, max_tokens=12)
    assert text_of(second) == told.choices[0].message.content
    assert told.usage is not None
    count = anthropic.messages.count_tokens(messages=blocks, system=system, model="quire-demo")
    assert count.input_tokens == told.usage.prompt_tokens


def test_cached_tokens_are_counted_separately(anthropic: Anthropic) -> None:
    long: Any = [{"role": "user", "content": "Once upon a time in the woods " * 20}]
    first = anthropic.messages.create(messages=long, **GREEDY).usage
    again = anthropic.messages.create(messages=long, **GREEDY).usage
    assert again.cache_read_input_tokens == (first.input_tokens + (first.cache_read_input_tokens or 0) - 1) // 32 * 32
    assert again.input_tokens + again.cache_read_input_tokens == first.input_tokens + (
        first.cache_read_input_tokens or 0
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "reads no images"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "reads no documents"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
            "no tool_use block before it",
        ),
        (
            {"messages": [*TALE, {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}]}]},
            "ends with thoughts of the assistant",
        ),
        ({"messages": [{"role": "user", "content": []}]}, r"messages\[0\].content is empty"),
        ({"messages": [{"role": "assistant", "content": []}, *TALE]}, r"messages\[0\].content is empty"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, r"tools\[0\].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"type": "object"}, "defer_loading": True}]}, "defer_loading is not"),
        ({"tool_choice": {"type": "any"}}, "'any', but there are no tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 12}}, "thinking.budget_tokens=12"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens=0"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is missing"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}},
            "output_config.format.schema can't be used",
        ),
        ({"output_config": {"effort": "extreme"}}, "can be none, minimal, low, medium, high, xhigh, max"),
        ({"stop_sequences": [""]}, "stop_sequences="),
        ({"temperature": -1}, "temperature"),
        ({"container": "c"}, "container"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_errors_of_bad_requests_name_the_field(anthropic: Anthropic, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequestError, match=words) as refused:
        anthropic.messages.create(**{**GREEDY, "messages": TALE, "extra_body": fields})
    assert refused.value.type == "invalid_request_error"


def test_fields_without_effect_are_accepted(anthropic: Anthropic) -> None:
    harmless: Any = {
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "thinking": {"type": "disabled"},
        "tools": [],
        "tool_choice": {"type": "auto"},
        "cache_control": {"type": "ephemeral"},
        "stop_sequences": [],
        "container": None,
    }
    betas: Any = anthropic.beta.messages.create(messages=TALE, betas=["some-beta-2026-01-01"], **GREEDY)
    assert betas.stop_reason == "max_tokens"
    assert anthropic.messages.create(**{**GREEDY, "messages": TALE, "extra_body": harmless}).content


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
def test_an_empty_last_answer_is_one_that_has_not_begun(anthropic: Anthropic, content: Any) -> None:
    def answer(*messages: Any) -> Any:
        return anthropic.messages.create(**{**GREEDY, "messages": messages}).content

    assert answer(*TALE, {"role": "assistant", "content": content}) == answer(*TALE)
    assert answer(*TALE, {"role": "assistant", "content": "\n"})
    begun = {"role": "assistant", "content": [{"type": "text", "text": "Once"}, {"type": "text", "text": ""}]}
    assert answer(*TALE, begun) == answer(*TALE, {"role": "assistant", "content": "Once"})


@pytest.mark.parametrize("kind", ["adaptive", "disabled"])
@pytest.mark.parametrize("budget", [None, 0, 31999])
def test_a_budget_for_thoughts_counts_only_where_it_is_set(anthropic: Anthropic, kind: str, budget: int | None) -> None:
    thinking = {"type": kind, "budget_tokens": budget}
    assert anthropic.messages.create(**{**GREEDY, "messages": TALE, "extra_body": {"thinking": thinking}}).content


def test_errors_are_the_clients_own_exceptions(anthropic: Anthropic, server: Server) -> None:
    with pytest.raises(NotFoundError) as unknown:
        anthropic.messages.create(**{**GREEDY, "model": "claude", "messages": TALE})
    assert unknown.value.type == "not_found_error"
    assert unknown.value.request_id == unknown.value.response.headers["x-request-id"]
    with pytest.raises(InternalServerError) as late:
        anthropic.messages.create(messages=TALE, **GREEDY, extra_headers={"X-Request-Timeout": "0.000001"})
    assert (late.value.status_code, late.value.type) == (504, "timeout_error")
    missing = server.request("/v1/messages/batches", {})
    assert (missing.status, missing.json()["error"]["type"]) == (404, "not_found_error")
    wrong = server.request("/v1/messages")
    assert (wrong.status, wrong.json()["type"], wrong.json()["request_id"]) == (
        405,
        "error",
        wrong.headers["request-id"],
    )
    assert server.request("/v1/message").error["type"] == "not_found_error"


def test_errors_about_keys_and_sizes_have_anthropics_types() -> None:
    with Server.start("--api-key", "secret", "--max-body-bytes", "1000") as server:
        with Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
            assert client.messages.create(messages=TALE, **GREEDY).stop_reason == "max_tokens"
        with (
            Anthropic(base_url=server.url, api_key="other", max_retries=0) as client,
            pytest.raises(AuthenticationError) as refused,
        ):
            client.messages.create(messages=TALE, **GREEDY)
        assert refused.value.type == "authentication_error"
        large = server.request("/v1/messages", b"x" * 2000, headers={"x-api-key": "secret"})
        assert (large.status, large.json()["error"]["type"]) == (413, "request_too_large")


def test_the_text_follows_a_json_schema(anthropic: Anthropic) -> None:
    schema: Any = {"type": "object", "properties": {"animal": {"enum": ["fox", "crow"]}}, "required": ["animal"]}
    message = anthropic.messages.create(
        model="quire-demo",
        max_tokens=100,
        messages=TALE,
        output_config={"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}},
    )
    assert json.loads(text_of(message))["animal"] in {"fox", "crow"}
    assert message.stop_reason == "end_turn"
