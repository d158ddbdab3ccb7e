"""Constrained answers through OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Literal

import jsonschema
import pytest
from http_server import Server, events_of
from json_schemas import MAX_TOKENS, SCHEMAS
from openai import AsyncOpenAI, BadRequestError, OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, Field

TALE: Any = [{"role": "user", "content": "Tell me a tale"}]
ASKED: Any = {"model": "quire-demo", "temperature": 1, "seed": 1, "max_tokens": MAX_TOKENS}
SUM = r"[0-9]{1,3}(\+[0-9]{1,3}){1,4}="
LARK = 'start: verb " the " /[a-z]{3,8}/ "."\nverb: "take" | "leave"'
GBNF = 'root ::= sum "="\nsum ::= [0-9]{1,3} ("+" [0-9]{1,3}){1,4}'
KINDS = [
    ({"regex": SUM}, SUM),
    ({"choice": ["yes", "no"]}, "yes|no"),
    ({"choice": ["", "x"]}, "x?"),
    ({"regex": "[^&&||;a-z]{2}[[a-c~~]{3}a{"}, r"[^&|;a-z]{2}[\[a-c~]{3}a\{"),
    ({"json": {"type": "string", "pattern": "^[&&0-9~~]{5}$"}}, r'"[&0-9~]{5}"'),
    ({"json": {"properties": {"k": {"const": 1}}, "type": "object", "required": ["k"]}}, r'\{\s*"k"\s*:\s*1\s*\}'),
    ({"grammar": LARK}, r"(take|leave) the [a-z]{3,8}\."),
    ({"grammar": GBNF}, SUM),
    ({"json": {"const": [1, 2]}, "disable_any_whitespace": True}, r"\[1,2\]"),
    ({"json": '{"const": [1, 2]}', "whitespace_pattern": "_"}, r"\[_?1_?,_?2_?\]"),
]


class Point(BaseModel):
    """A model that a user of pydantic may define."""

    x: int = Field(ge=-9, le=9)
    colour: Literal["red", "green"]
    tags: list[Literal["a", "b"]] = Field(max_length=2)


def json_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    """Return a `response_format` with a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


def test_answers_to_fifty_schemas_validate(server: Server) -> None:
    async def answer(client: AsyncOpenAI, index: int, schema: Any) -> str:
        form: Any = json_schema(schema, strict=bool(index % 3))
        if index % 2:
            body = {"response_format": form}
            done: Completion = await client.completions.create(prompt="As JSON: ", extra_body=body, **ASKED)
            assert done.choices[0].finish_reason == "stop", done
            return done.choices[0].text
        said: ChatCompletion = await client.chat.completions.create(messages=TALE, response_format=form, **ASKED)
        assert said.choices[0].finish_reason == "stop", said
        return said.choices[0].message.content or ""

    async def answers() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(answer(client, *each) for each in enumerate(SCHEMAS.values())))

    kind = jsonschema.Draft202012Validator
    for schema, text in zip(SCHEMAS.values(), asyncio.run(answers()), strict=True):
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))


def test_pydantic_models_are_parsed(openai: OpenAI) -> None:
    done = openai.chat.completions.parse(messages=TALE, response_format=Point, n=2, **ASKED)
    assert all(isinstance(choice.message.parsed, Point) for choice in done.choices)
    with openai.chat.completions.stream(messages=TALE, response_format=Point, **ASKED) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == done.choices[0].message.parsed


@pytest.mark.parametrize(("fields", "pattern"), KINDS)
def test_each_kind_of_constraint_holds(openai: OpenAI, fields: dict[str, Any], pattern: str) -> None:
    body = {"structured_outputs": fields}
    whole = openai.completions.create(prompt=["It is ", "So"], n=2, extra_body=body, **ASKED)
    assert len(whole.choices) == 4
    assert all(re.fullmatch(pattern, choice.text) for choice in whole.choices)
    said = openai.chat.completions.create(messages=TALE, extra_body=body, **ASKED).choices[0]
    assert re.fullmatch(pattern, said.message.content or "")
    streamed = ["", ""]
    for chunk in openai.chat.completions.create(messages=TALE, stream=True, n=2, extra_body=body, **ASKED):
        for part in chunk.choices:
            streamed[part.index] += part.delta.content or ""
    assert streamed[0] == said.message.content
    assert re.fullmatch(pattern, streamed[1])


def test_formats_without_a_schema(openai: OpenAI) -> None:
    any_object: Any = {"type": "json_object"}
    eight: Any = {**ASKED, "seed": 0, "n": 8, "max_tokens": 200, "extra_body": {"response_format": any_object}}
    found = openai.completions.create(prompt="Once upon a time there was", **eight).choices
    whole = [json.loads(choice.text) for choice in found if choice.finish_reason == "stop"]
    assert whole
    assert all(isinstance(value, dict) for value in whole)
    short: Any = {**ASKED, "max_tokens": 8}
    begun = openai.chat.completions.create(messages=TALE, response_format=any_object, **short).choices[0]
    assert (begun.message.content or "").startswith("{")
    free = openai.chat.completions.create(messages=TALE, **short)
    text = openai.chat.completions.create(messages=TALE, response_format={"type": "text"}, **short)
    assert text.choices[0].message.content == free.choices[0].message.content
    nameless: Any = {"type": "json_schema", "json_schema": {"name": "any"}}
    some = openai.chat.completions.create(messages=TALE, response_format=nameless, **short)
    assert (some.choices[0].message.content or "").startswith("{")


def test_an_answer_may_end_before_its_grammar(openai: OpenAI) -> None:
    body = {"structured_outputs": {"regex": "a{50}b{50}"}}
    stopped = openai.completions.create(prompt="x", stop=["aab"], extra_body=body, **ASKED).choices[0]
    assert (stopped.text, stopped.finish_reason) == ("a" * 48, "stop")
    short = openai.completions.create(prompt="x", extra_body=body, **{**ASKED, "max_tokens": 3}).choices[0]
    assert short.finish_reason == "length"
    endless = {"structured_outputs": {"regex": "[a-z ]+"}, "ignore_eos": True}
    with openai.completions.create(prompt="x", stream=True, extra_body=endless, **{**ASKED, "max_tokens": 2000}) as it:
        next(iter(it))  # then disconnect: no page is held at the end


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": json_schema({"type": "array", "uniqueItems": True})}, "response_format", "uniqueItems"),
    ({"response_format": json_schema({"type": "strin"})}, "response_format", "Invalid type"),
    ({"response_format": json_schema([])}, "response_format.json_schema.schema", "expected `object"),
    ({"response_format": json_schema({"const": "x" * 300_000})}, "response_format", "json_schema.schema has 3000"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name", "is missing"),
    ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format", "is not supported"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "not a known field"),
    ({"response_format": "json"}, "response_format", "expected `object"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
    ({"structured_outputs": {"grammar": "what is this"}}, "structured_outputs", "neither Lark nor GBNF"),
    ({"structured_outputs": {"grammar": "root ::= x\nx ::= ["}}, "structured_outputs", "line 2: a class without"),
    ({"structured_outputs": {"regex": "x*+"}}, "structured_outputs", "one quantifier after another"),
    ({"response_format": json_schema({"oneOf": [{}, {}]})}, "response_format", "no value fits two of its schemas"),
    ({"response_format": json_schema({"minProperties": 2})}, "response_format", "could come twice"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs", "unknown name"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "not a JSON schema"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "allows no text"),
    ({"structured_outputs": {}}, "structured_outputs", "asks for nothing"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "asks for regex and choice"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not a known field"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format", "both"),
    ({"structured_outputs": {"regex": "a"}, "use_beam_search": True}, "structured_outputs", "beam search"),
    ({"guided_regex": "a"}, "guided_regex", 'use structured_outputs={"regex": "..."}'),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_an_unenforceable_constraint_is_a_bad_request(
    openai: OpenAI, fields: dict[str, Any], param: str, words: str
) -> None:
    """This holds before a stream begins as well."""
    asked: Any = {"model": "quire-demo", "max_tokens": 4, "extra_body": fields}
    streams = (False,) if "use_beam_search" in fields else (False, True)
    for stream in streams:
        for ask in (
            lambda: openai.completions.create(prompt=["x", "y"], stream=stream, **asked),  # noqa: B023 - called here
            lambda: openai.chat.completions.create(messages=TALE, stream=stream, **asked),  # noqa: B023
        ):
            with pytest.raises(BadRequestError) as caught:
                ask()
            assert caught.value.param == param
            assert words in caught.value.message


def test_a_stream_that_ends_early_has_a_finish_reason(server: Server) -> None:
    body = {"prompt": "x", "structured_outputs": {"regex": "[0-9]{40}"}, "max_tokens": 3, "stream": True}
    events = events_of(server.request("/v1/completions", body).body)
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]][-1] == "length"
    assert re.fullmatch("[0-9]{3}", "".join(event["choices"][0]["text"] for event in events[:-1]))
