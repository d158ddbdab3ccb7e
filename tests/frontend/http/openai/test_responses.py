"""`/v1/responses` through OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from http_server import Server, events_of
from openai import BadRequestError, InternalServerError, NotFoundError, OpenAI
from openai.types.responses import Response, ResponseOutputMessage, ResponseOutputText, ResponseStreamEvent
from pydantic import TypeAdapter

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TALE = "Tell me a tale"
GREEDY: Any = {"model": "quire-demo", "temperature": 0, "max_output_tokens": 12}
LOGPROBS: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.incomplete",
]


def text_of(response: Response) -> ResponseOutputText:
    [message] = response.output
    assert isinstance(message, ResponseOutputMessage)
    [part] = message.content
    assert isinstance(part, ResponseOutputText)
    return part


def without_names(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without the parts that differ between responses to the same body."""
    items = [{**item, "id": None} for item in response["output"]]
    names = dict.fromkeys(["id", "created_at", "completed_at", "usage"])
    return {**response, **names, "output": items}


def test_a_response_has_the_text_of_a_chat(openai: OpenAI) -> None:
    response = openai.responses.create(input=TALE, **GREEDY)
    chat = openai.chat.completions.create(
        model="quire-demo", messages=[{"role": "user", "content": TALE}], temperature=0, max_tokens=12
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert (response.usage.output_tokens, response.usage.total_tokens) == (12, chat.usage.total_tokens)
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_a_response_has_every_member_that_the_client_requires(server: Server) -> None:
    body = {"input": TALE, "instructions": "Be brief.", "metadata": {"a": "b"}, "user": "me", "max_output_tokens": 3}
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}]
    answer = server.request("/v1/responses", {**body, "tools": tools, "tool_choice": "none"}).json()
    response = Response.model_validate(answer)
    assert (response.instructions, response.metadata, response.user) == ("Be brief.", {"a": "b"}, "me")
    assert (response.tool_choice, [tool.type for tool in response.tools]) == ("none", ["function"])
    assert response.text is not None
    assert response.text.format is not None
    assert (response.text.format.type, response.truncation, response.error) == ("text", "disabled", None)
    assert (answer["store"], answer["object"]) == (False, "response")
    assert response.id.startswith("resp_")
    assert response.output[0].id is not None
    assert response.output[0].id.startswith("msg_")


def test_a_stream_adds_up_to_the_whole(server: Server) -> None:
    body = {"input": TALE, **GREEDY, **LOGPROBS}
    whole = server.request("/v1/responses", body).json()
    reply = server.request("/v1/responses", {**body, "stream": True})
    events = events_of(reply.body)
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [line.removeprefix("event: ") for line in reply.body.decode().split("\n") if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    assert list(dict.fromkeys(names)) == ORDER
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == text_of(Response.model_validate(whole)).text
    assert [entry for event in deltas for entry in event["logprobs"]] == whole["output"][0]["content"][0]["logprobs"]
    assert events[0]["response"]["output"] == []
    assert without_names(events[-1]["response"]) == without_names(whole)


def test_the_clients_stream_helper_completes(openai: OpenAI) -> None:
    arguments: Any = {"model": "quire-demo", "input": TALE, "temperature": 0, "extra_body": {"stop": [" Fox"]}}
    whole = openai.responses.create(**arguments)
    with openai.responses.stream(**arguments) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.completed" in kinds
    assert (whole.status, final.status) == ("completed", "completed")
    assert whole.incomplete_details is None
    assert final.output_text == whole.output_text
    assert " Fox" not in final.output_text
    assert (final.usage, final.output[0].status) == (whole.usage, "completed")  # type: ignore[union-attr]


def test_logprobs_cover_the_text(openai: OpenAI) -> None:
    part = text_of(openai.responses.create(input=TALE, **GREEDY, **LOGPROBS))
    assert part.logprobs is not None
    assert len(part.logprobs) == 12
    assert bytes(byte for entry in part.logprobs for byte in entry.bytes).decode() == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def test_output_items_are_accepted_as_input(openai: OpenAI) -> None:
    first = openai.responses.create(input=TALE, **GREEDY)
    items: Any = [
        {"role": "system", "content": "You tell tales."},
        {"role": "user", "content": [{"type": "input_text", "text": TALE}]},
        *first.output,
        {"role": "user", "content": "Go on"},
    ]
    chat: Any = [
        {"role": "system", "content": "You tell tales."},
        {"role": "user", "content": TALE},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Go on"},
    ]
    second = openai.responses.create(input=items, **GREEDY)
    told = openai.responses.create(input=items[1:], instructions="You tell tales.", **GREEDY)
    done = openai.chat.completions.create(model="quire-demo", messages=chat, temperature=0, max_tokens=12)
    assert second.output_text == told.output_text == done.choices[0].message.content


def test_nothing_is_stored_without_a_store(openai: OpenAI) -> None:
    for more in ({"store": True}, {"previous_response_id": "resp_1"}):
        with pytest.raises(BadRequestError, match="--response-store PATH"):
            openai.responses.create(input=TALE, **GREEDY, **more)
    response = openai.responses.create(input=TALE, store=False, **GREEDY)
    for ask in (openai.responses.retrieve, openai.responses.delete, openai.responses.cancel):
        with pytest.raises(NotFoundError, match="stores none"):
            ask(response.id)
    with pytest.raises(NotFoundError, match=response.id):
        openai.responses.input_items.list(response.id)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", True),
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("background", True),
        ("prompt", {"id": "pmpt_1"}),
        ("include", ["file_search_call.nonsense"]),
        ("truncation", "auto"),
        ("service_tier", "flex"),
        ("max_tool_calls", 3),
        ("n", 2),
        ("top_logprobs", 2),
        ("messages", []),
        ("input", []),
        ("nonsense", 1),
    ],
)
def test_unsupported_values_are_rejected_with_the_field_named(openai: OpenAI, field: str, value: Any) -> None:
    arguments: Any = {"model": "quire-demo", "input": TALE, "extra_body": {field: value}}
    with pytest.raises(BadRequestError, match=field) as refused:
        openai.responses.create(**arguments)
    assert refused.value.param == field


def test_fields_without_effect_are_accepted(openai: OpenAI) -> None:
    harmless: Any = {
        **dict.fromkeys(["store", "background", "parallel_tool_calls"], False),
        **dict.fromkeys(["previous_response_id", "conversation", "prompt", "metadata", "tools", "max_tool_calls"]),
        "truncation": "disabled",
        "service_tier": "auto",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
    }
    assert openai.responses.create(input=TALE, **GREEDY, extra_body=harmless).output_text


def test_errors_are_the_clients_own_exceptions(openai: OpenAI, server: Server) -> None:
    with pytest.raises(NotFoundError) as unknown:
        openai.responses.create(model="gpt-5", input=TALE)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(BadRequestError, match="temperature"):
        openai.responses.create(**{**GREEDY, "input": TALE, "temperature": -1, "stream": True})
    with pytest.raises(BadRequestError, match="max_output_tokens=99999 with a prompt of"):
        openai.responses.create(**{**GREEDY, "input": TALE, "max_output_tokens": 99999})
    with pytest.raises(BadRequestError, match="reads no images") as picture:
        openai.responses.create(
            **GREEDY, input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": "low"}]}]
        )
    assert picture.value.param == "input[0].content[0]"
    with pytest.raises(InternalServerError) as late:
        openai.responses.create(input=TALE, **GREEDY, extra_headers={"X-Request-Timeout": "0.000001"})
    assert late.value.code == "deadline_exceeded"
    assert server.request("/v1/responses", {"model": "quire-demo"}).error["param"] == "input"


SCHEMA: Any = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "crow"]}, "legs": {"type": "integer", "maximum": 4, "minimum": 0}},
    "required": ["animal", "legs"],
    "additionalProperties": False,
}


def test_the_text_follows_a_json_schema(openai: OpenAI) -> None:
    form: Any = {"type": "json_schema", "name": "animal", "schema": SCHEMA, "strict": True}
    arguments: Any = {"model": "quire-demo", "input": TALE, "text": {"format": form}}
    whole = openai.responses.create(**arguments)
    jsonschema.validate(json.loads(whole.output_text), SCHEMA)
    assert whole.status == "completed"
    assert whole.text is not None
    assert whole.text.format is not None
    assert whole.text.format.type == "json_schema"
    text = "".join(
        event.delta
        for event in openai.responses.create(stream=True, **arguments)
        if event.type == "response.output_text.delta"
    )
    jsonschema.validate(json.loads(text), SCHEMA)


def test_an_unenforceable_format_is_rejected(openai: OpenAI) -> None:
    for form in ({"type": "json_schema", "name": "x"}, {"type": "json_schema", "name": "x", "schema": {"type": "no"}}):
        arguments: Any = {**GREEDY, "input": TALE, "text": {"format": form}}
        for stream in (False, True):
            with pytest.raises(BadRequestError, match=r"text\.format\.schema") as refused:
                openai.responses.create(stream=stream, **arguments)
            assert refused.value.param == "text.format.schema"
