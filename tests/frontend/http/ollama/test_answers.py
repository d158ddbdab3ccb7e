"""`/api/generate` and `/api/chat` through Ollama's client, against the same requests to OpenAI's API."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import jsonschema
import pytest
from engine_watch import EngineWatch
from http_server import Reply, Server
from ollama import Client, ResponseError
from openai import OpenAI
from raw_http import RawConnection, post

from quire.protocol.messages import EventType, FinishReason, StepTrace

MODEL = "quire-demo"
PROMPT = "Once upon a time"
TALE: Any = [{"role": "user", "content": "Tell me a tale"}]
GREEDY: Any = {"temperature": 0, "num_predict": 12}
SCHEMA: Any = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "crow"]}},
    "required": ["animal"],
    "additionalProperties": False,
}
DURATIONS = ["total_duration", "load_duration", "prompt_eval_duration", "eval_duration"]
STATISTICS = {*DURATIONS, "done_reason", "prompt_eval_count", "eval_count"}


@pytest.fixture(scope="module")
def ollama(server: Server) -> Client:
    return Client(host=server.url)


def lines_of(body: bytes) -> list[Any]:
    """Return the decoded lines of a stream, each of which ends with a line break."""
    *lines, rest = body.split(b"\n")
    assert rest == b""
    return [json.loads(line) for line in lines]


def completion(openai: OpenAI, **fields: Any) -> str:
    """Return the text that OpenAI's API gives for a prompt."""
    given = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 12, **fields}
    return str(openai.completions.create(**given).choices[0].text)


def chat(openai: OpenAI, messages: Any, **fields: Any) -> Any:
    """Return the answer that OpenAI's API gives in a conversation."""
    return openai.chat.completions.create(
        **{"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 12, **fields}
    )


def test_a_chat_has_the_answer_of_openais(ollama: Client, openai: OpenAI) -> None:
    before = datetime.now(UTC)
    answer = ollama.chat(MODEL, TALE, options=GREEDY)
    expected = chat(openai, TALE)
    assert (answer.message.role, answer.message.content) == ("assistant", expected.choices[0].message.content)
    assert (answer.model, answer.done, answer.done_reason) == (MODEL, True, "length")
    assert (answer.prompt_eval_count, answer.eval_count) == (expected.usage.prompt_tokens, 12)
    assert answer.created_at is not None
    assert answer.created_at.endswith("Z")
    assert before <= datetime.fromisoformat(answer.created_at) <= datetime.now(UTC)
    total, *parts = (answer[name] for name in DURATIONS)
    assert all(part > 0 for part in parts)
    assert sum(parts) <= total


def test_a_prompt_is_a_message_of_the_user_unless_it_is_raw(ollama: Client, openai: OpenAI) -> None:
    asked = ollama.generate(MODEL, "Tell me a tale", options=GREEDY)
    assert asked.response == chat(openai, TALE).choices[0].message.content
    system: Any = [{"role": "system", "content": "You tell tales."}]
    told = ollama.generate(MODEL, "Tell me a tale", system="You tell tales.", options=GREEDY)
    expected = chat(openai, [*system, *TALE])
    assert told.response == expected.choices[0].message.content
    assert told.prompt_eval_count == expected.usage.prompt_tokens
    raw = ollama.generate(MODEL, PROMPT, raw=True, options=GREEDY)
    assert raw.response == completion(openai)
    assert raw.eval_count == 12


def test_streams_add_up_to_the_whole(ollama: Client) -> None:
    whole = ollama.chat(MODEL, TALE, options=GREEDY)
    *pieces, last = ollama.chat(MODEL, TALE, options=GREEDY, stream=True)
    assert pieces
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    assert (last.message.content, last.done_reason, last.eval_count) == ("", "length", 12)
    text = ollama.generate(MODEL, PROMPT, options=GREEDY)
    *parts, end = ollama.generate(MODEL, PROMPT, options=GREEDY, stream=True)
    assert "".join(part.response or "" for part in parts) == text.response
    assert (end.response, end.done_reason, end.eval_count) == ("", "length", 12)


@pytest.mark.parametrize(
    ("path", "fields", "content"),
    [("chat", {"messages": TALE}, "message"), ("generate", {"prompt": PROMPT}, "response")],
)
def test_answers_are_lines_of_json_unless_a_client_wants_one(
    server: Server, path: str, fields: dict[str, Any], content: str
) -> None:
    body = {"model": MODEL, **fields, "options": GREEDY}
    for given in (body, {**body, "stream": True}):
        reply = server.request(f"/api/{path}", given)
        assert (reply.status, reply.headers["content-type"]) == (200, "application/x-ndjson")
        *pieces, last = lines_of(reply.body)
        assert all(set(piece) == {"model", "created_at", "done", content} for piece in pieces)
        assert not any(piece["done"] for piece in pieces)
        assert set(last) == {"model", "created_at", "done", content} | STATISTICS
        assert last["done"]
    whole = server.request(f"/api/{path}", {**body, "stream": False})
    assert whole.headers["content-type"] == "application/json"
    assert set(whole.json()) == set(last)


def test_a_stop_text_ends_the_answer(ollama: Client) -> None:
    options = {**GREEDY, "num_predict": 50, "stop": ["no such", " Fox"]}
    answer = ollama.chat(MODEL, TALE, options=options)
    assert answer.done_reason == "stop"
    assert answer.message.content
    assert " Fox" not in answer.message.content
    assert ollama.chat(MODEL, TALE, options={**options, "stop": " Fox"}).message == answer.message


def test_sampling_options_are_those_of_openais_api(ollama: Client, openai: OpenAI) -> None:
    given: Any = {
        "temperature": 1.3,
        "seed": 7,
        "top_p": 0.9,
        "top_k": 30,
        "min_p": 0.01,
        "repeat_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "num_predict": 40,
    }
    raw = ollama.generate(MODEL, PROMPT, raw=True, options=given)
    vllm = {"top_k": 30, "min_p": 0.01, "repetition_penalty": 1.2}
    same = {name: given[name] for name in ("temperature", "seed", "top_p", "presence_penalty", "frequency_penalty")}
    assert raw.response == completion(openai, **same, max_tokens=40, extra_body=vllm)
    for name, value in {"seed": 8, "top_k": 1, "repeat_penalty": 1.9, "num_predict": 20, "temperature": 0}.items():
        assert ollama.generate(MODEL, PROMPT, raw=True, options={**given, name: value}).response != raw.response
    neutral = {**given, "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    free = ollama.generate(MODEL, PROMPT, raw=True, options=neutral).response
    assert free != raw.response
    assert ollama.generate(MODEL, PROMPT, raw=True, options={**given, "repeat_last_n": 0}).response == free
    assert ollama.generate(MODEL, PROMPT, raw=True, options={**given, "repeat_last_n": -1}).response == raw.response
    assert ollama.generate(MODEL, PROMPT, raw=True, options={**neutral, "repeat_last_n": 64}).response == free


def test_fields_that_change_nothing_are_accepted(server: Server) -> None:
    body: Any = {"model": MODEL, "prompt": PROMPT, "options": GREEDY, "stream": False}
    plain = server.request("/api/generate", body).json()["response"]
    options = {
        **GREEDY,
        "num_ctx": 2048,
        "num_keep": 4,
        "num_batch": 512,
        "num_gpu": 99,
        "num_thread": 8,
        "use_mmap": True,
        "low_vram": False,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "typical_p": 1,
        "tfs_z": 1.0,
        "repeat_last_n": 64,
        "penalize_newline": True,
        "unknown": None,
    }
    more: Any = {
        "options": options,
        "keep_alive": "5m",
        "context": [],
        "images": [],
        "suffix": "",
        "template": "",
        "format": "",
        "system": "",
        "raw": False,
        "logprobs": False,
        "truncate": False,
    }
    assert server.request("/api/generate", {**body, **more}).json()["response"] == plain
    for keep_alive in (-1, 0, 3600, 0.5, "0", "-1m", "1h30m", "1.5s"):
        assert server.request("/api/generate", {**body, "keep_alive": keep_alive}).json()["response"] == plain


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_has_no_effect_is_said_in_a_header(server: Server, path: str, stream: bool) -> None:
    asked: Any = {"prompt": PROMPT} if path == "/api/generate" else {"messages": TALE}
    body: Any = {"model": MODEL, **asked, "stream": stream}
    usual = {"repeat_last_n": 64, "repeat_penalty": 1.1}
    changed = {**GREEDY, **usual, "num_ctx": 1 << 20, "draft_num_predict": 4, 'odd\n"é': [1], "unset": None}
    plain = server.request(path, {**body, "options": {**GREEDY, "repeat_penalty": 1.1}})
    reply = server.request(path, {**body, "options": changed})
    assert (plain.status, reply.status) == (200, 200)
    assert "x-quire-ignored" not in plain.headers

    def text(reply: Reply) -> str:
        lines = [json.loads(line) for line in reply.body.splitlines()]
        return "".join(line["response"] if "response" in line else line["message"]["content"] for line in lines)

    assert text(reply) == text(plain)
    assert "warning" not in reply.headers
    assert reply.headers["x-quire-ignored"] == (
        "options.repeat_last_n (penalties apply to all tokens), options.num_ctx (the context length stays 2048), "
        "options.draft_num_predict, options.odd???"
    )


def test_many_unknown_options_make_a_short_header(server: Server) -> None:
    options = {f"{'x' * 300}{number:03}": 1 for number in range(200)} | GREEDY
    reply = server.request("/api/generate", {"model": MODEL, "prompt": PROMPT, "options": options})
    assert reply.status == 200
    assert reply.headers["x-quire-ignored"].endswith(", and 184 more")
    assert len(reply.headers["x-quire-ignored"]) < 1500


HISTORY: Any = [
    {"role": role, "content": f"{number}. " + "The fox said to the crow that it was a fine day. " * 8}
    for number in range(20)
    for role in ("user", "assistant")
]


@pytest.mark.parametrize("stream", [False, True])
def test_a_history_beyond_the_context_loses_its_oldest_turns(server: Server, openai: OpenAI, stream: bool) -> None:
    system: Any = [{"role": "system", "content": "You tell tales."}]
    body: Any = {"model": MODEL, "messages": [*system, *HISTORY, *TALE], "options": GREEDY, "stream": stream}
    reply = server.request("/api/chat", body)
    assert reply.status == 200
    last = json.loads(reply.body.splitlines()[-1])
    found = re.fullmatch(
        r"messages \((\d+) of the oldest beyond the context length\)",
        reply.headers["x-quire-ignored"],
    )
    assert found is not None
    left_out = int(found[1])
    assert 0 < left_out < len(HISTORY)
    assert left_out % 2 == 0, "a history begins with the user"

    def num_tokens(number: int) -> int:
        rest = [*system, *HISTORY[number:], *TALE]
        return int(server.request("/tokenize", {"messages": rest}).json()["count"])

    room = GREEDY["num_predict"]
    assert num_tokens(left_out) == last["prompt_eval_count"] <= 2048 - room < num_tokens(left_out - 2)
    text = "".join(json.loads(line)["message"]["content"] for line in reply.body.splitlines())
    expected = chat(openai, [*system, *HISTORY[left_out:], *TALE])
    assert text == expected.choices[0].message.content
    assert server.request("/api/chat", {**body, "truncate": False}).status == 400
    short = server.request("/api/chat", {**body, "messages": [*system, *HISTORY[:8], *TALE]})
    assert "x-quire-ignored" not in short.headers


def test_a_long_loop_of_calls_loses_its_oldest_rounds(server: Server) -> None:
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    rounds: Any = [
        message
        for number in range(40)
        for message in (
            {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"n": number}}}]},
            {"role": "tool", "tool_name": "look", "content": f"{number}. " + "The fox saw a crow in the tree. " * 8},
        )
    ]
    body: Any = {"model": MODEL, "messages": [*TALE, *rounds], "tools": [tool], "options": GREEDY, "stream": False}
    reply = server.request("/api/chat", body)
    assert reply.status == 200, reply.body
    found = re.fullmatch(r"messages \((\d+) of .*\)", reply.headers["x-quire-ignored"])
    assert found is not None
    left_out = int(found[1])
    assert left_out % 2 == 0
    assert 0 < left_out < len(rounds)
    kept = {**body, "messages": [*TALE, *rounds[left_out:]]}
    same = server.request("/api/chat", {**kept, "truncate": False})
    assert same.json()["prompt_eval_count"] == reply.json()["prompt_eval_count"] <= 2048 - 12
    assert server.request("/api/chat", {**body, "truncate": False}).status == 400


def test_what_no_turn_can_make_room_for_is_rejected(server: Server) -> None:
    for messages in (
        [*HISTORY, {"role": "user", "content": "fox " * 5000}],
        [{"role": "system", "content": "fox " * 5000}, *HISTORY, *TALE],
        [{"role": "user", "content": "fox " * 200_000}, {"role": "user", "content": "fox " * 200_000}],
    ):
        reply = server.request("/api/chat", {"model": MODEL, "messages": messages, "options": GREEDY})
        assert reply.status == 400
        assert "context length is 2048" in reply.json()["error"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"suffix": "end"}, "suffix is not supported: fill-in-the-middle"),
        ({"template": "{{ .Prompt }}"}, "template is not supported"),
        ({"context": [1, 2]}, "context is not supported: send the conversation so far to POST /api/chat"),
        ({"images": ["aGk="]}, "images is not supported: this server reads no images"),
        ({"logprobs": True}, "logprobs is not supported"),
        ({"truncate": True}, "truncate is not supported"),
        ({"shift": True}, "shift is not supported"),
        ({"width": 64}, "width is not supported"),
        ({"think": True}, 'think=True is not possible: "quire-demo" does not support thinking'),
        ({"think": "high"}, "think='high'"),
        ({"raw": True, "system": "Be brief."}, "system is for the chat template, which raw=true leaves out"),
        ({"format": "xml"}, "format='xml' is not known"),
        ({"format": {"type": "no such"}}, "format can't be used"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"keep_alive": "1" * 60 + "x"}, "keep_alive"),
        ({"nonsense": 1}, "nonsense is not a known field"),
        ({"options": {"temperature": -1}}, "options.temperature=-1"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"top_p": 2}}, "options.top_p=2"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty=0"),
        ({"options": {"presence_penalty": 9}}, "options.presence_penalty=9"),
        ({"options": {"seed": 10**30}}, "options.seed"),
        ({"options": {"stop": [""]}}, "options.stop="),
        ({"options": {"stop": ["x"] * 1000}}, "options.stop"),
        ({"options": {"num_predict": 0}}, "options.num_predict=0"),
        ({"options": {"num_predict": -3}}, "options.num_predict"),
        ({"options": {"mirostat": 2}}, "options.mirostat=2 is not supported"),
        ({"options": {"typical_p": 0.5}}, "options.typical_p=0.5 is not supported"),
        ({"options": {"num_gpu": 10**30}}, "options.num_gpu"),
        ({"prompt": "and " * 5000}, "2048"),
    ],
)
def test_what_is_not_supported_is_named(server: Server, fields: dict[str, Any], words: str) -> None:
    reply = server.request("/api/generate", {"model": MODEL, "prompt": PROMPT, **fields})
    assert reply.status == 400
    error = reply.json()
    assert set(error) == {"error"}
    assert words in error["error"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "alien", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content"),
        ({"role": "user", "content": "x", "images": ["aGk="]}, "messages[0].images is not supported"),
        ({"role": "user", "content": "x", "thinking": "y"}, "messages[0].thinking is given with role 'user'"),
        ({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, "arguments"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, "ends with tool_calls"),
        ({"role": "assistant", "content": "", "thinking": "Hm"}, "ends with thoughts of the assistant"),
    ],
)
def test_bad_messages_are_named(ollama: Client, server: Server, message: dict[str, Any], words: str) -> None:
    reply = server.request("/api/chat", {"model": MODEL, "messages": [message]})
    assert reply.status == 400
    assert words in reply.json()["error"]
    assert ollama.chat(MODEL, TALE, options={"num_predict": 1}).done


@pytest.mark.parametrize("content", ["", None])
def test_an_empty_last_answer_is_one_that_has_not_begun(server: Server, content: str | None) -> None:
    def answer(*messages: dict[str, Any]) -> str:
        asked = {"model": MODEL, "messages": messages, "stream": False, "options": {"temperature": 0, "num_predict": 8}}
        return str(server.request("/api/chat", asked).json()["message"]["content"])

    user = {"role": "user", "content": "Tell me a tale"}
    assert answer(user, {"role": "assistant", "content": content}) == answer(user)
    assert answer(user, {"role": "assistant", "content": "\n"})


def test_an_empty_prompt_checks_the_model(ollama: Client, server: Server) -> None:
    for answer in (ollama.generate(MODEL), ollama.generate(MODEL, keep_alive=-1)):
        assert (answer.response, answer.done, answer.done_reason) == ("", True, "load")
    [line] = ollama.generate(MODEL, stream=True)
    assert line.done_reason == "load"
    empty = ollama.chat(MODEL)
    assert (empty.message.content, empty.done, empty.done_reason) == ("", True, "load")
    assert server.request("/api/chat", {"model": MODEL, "messages": []}).json()["done_reason"] == "load"


def test_a_name_may_have_the_tag_latest(ollama: Client) -> None:
    for name in ("quire-demo", "quire-demo:latest"):
        assert ollama.generate(name, PROMPT, options=GREEDY).model == name
    for name in ("quire-demo:7b", "llama3.2", "quire-demo:latest:latest"):
        with pytest.raises(ResponseError, match=f'model "{name}" not found, this server has quire-demo') as refused:
            ollama.chat(name, TALE)
        assert refused.value.status_code == 404
        with pytest.raises(ResponseError, match="not found"):
            list(ollama.generate(name, PROMPT, stream=True))


def test_an_answer_follows_its_format(ollama: Client) -> None:
    told = ollama.chat(MODEL, TALE, format=SCHEMA, options={"num_predict": 100})
    jsonschema.validate(json.loads(told.message.content or ""), SCHEMA)
    assert told.done_reason == "stop"
    for raw in (False, True):
        made = ollama.generate(MODEL, PROMPT, format=SCHEMA, raw=raw)
        jsonschema.validate(json.loads(made.response or ""), SCHEMA)
    open_schema = {"type": "object", "properties": {"k": {"const": 1}}}
    made = ollama.generate(MODEL, PROMPT, format=open_schema, raw=True)
    assert (json.loads(made.response or "") in ({}, {"k": 1}), made.done_reason) == (True, "stop")
    any_object = ollama.generate(MODEL, PROMPT, format="json", options={**GREEDY, "num_predict": 5})
    assert (any_object.response or "").startswith("{")


def test_an_answer_may_fill_the_context(ollama: Client) -> None:
    long = "and " * 2000
    for num_predict in (-1, -2, 10**6):
        answer = ollama.generate(MODEL, long, raw=True, options={"temperature": 0, "num_predict": num_predict})
        assert answer.done_reason in {"length", "stop"}
        assert (answer.prompt_eval_count or 0) + (answer.eval_count or 0) <= 2048
        assert answer.done_reason == "stop" or answer.prompt_eval_count + answer.eval_count == 2048  # type: ignore[operator]


def test_a_begun_answer_is_continued(ollama: Client) -> None:
    whole = ollama.chat(MODEL, TALE, options=GREEDY).message.content or ""
    begun = whole[: whole.index(" Fox")]
    rest = ollama.chat(MODEL, [*TALE, {"role": "assistant", "content": begun}], options=GREEDY).message.content or ""
    assert rest.startswith(whole[len(begun) :])


@pytest.fixture
def watch(server: Server) -> Iterator[EngineWatch]:
    with EngineWatch(server) as watch:
        yield watch


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_request_ends_when_its_client_leaves(server: Server, watch: EngineWatch, stream: bool) -> None:
    long = {"type": "array", "items": {"enum": [1]}, "minItems": 900}
    body = {"model": MODEL, "messages": TALE, "format": long, "stream": stream}
    connection = RawConnection(server.url).send(post("/api/chat", body))
    number = watch.decode()
    connection.close()

    def has_ended(step: StepTrace) -> bool:
        return any(event.number == number and event.type is EventType.FINISHED for event in step.events)

    [end] = [event for event in watch.until(has_ended)[-1].events if event.type is EventType.FINISHED]
    assert end.finish_reason is FinishReason.ABORT


def test_a_time_limit_ends_a_request(server: Server) -> None:
    late = server.request("/api/chat", {"messages": TALE}, headers={"X-Request-Timeout": "0.000001"})
    assert late.status == 504
    assert "time limit" in late.json()["error"]


def test_content_types_do_not_matter_but_for_web_pages(server: Server) -> None:
    body = json.dumps({"messages": TALE, "options": GREEDY}).encode()
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # curl's, as in Ollama's manual
    assert server.request("/api/chat", body, headers=form).status == 200
    page = server.request("/api/chat", body, headers={**form, "Origin": "http://example.com"})
    assert page.status == 415
    assert "send JSON" in page.json()["error"]
    assert server.request("/v1/chat/completions", body, headers=form).status == 415
