"""Stored responses: conversations by `previous_response_id`, and the endpoints below `/v1/responses/`."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from chat_templates import QWEN_THINKING
from demo_copies import THINK, THOUGHT, thinking_model
from http_server import Server, events_of
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.responses import Response
from patience import PATIENCE
from quire_command import quire_command

TALE = "Tell me a tale"
GREEDY: Any = {"model": "quire-demo", "temperature": 0, "max_output_tokens": 12}
LOOK: Any = {
    "type": "function",
    "name": "look",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
}
KEYS = ("key-of-one", "key-of-another")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the demo model with a store."""
    with Server.start("--response-store", str(tmp_path_factory.mktemp("store") / "responses.db")) as server:
        yield server


def client_of(server: Server, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def item_texts(openai: OpenAI, response_id: str, **query: Any) -> list[str]:
    page = openai.responses.input_items.list(response_id, **query)
    return [item.content[0].text for item in page if item.type == "message"]  # type: ignore[union-attr]


def ended(server: Server, response_id: str) -> dict[str, Any]:
    """Return a stored response, once it is there."""
    deadline = time.monotonic() + PATIENCE
    while (reply := server.request(f"/v1/responses/{response_id}")).status == 404:
        assert time.monotonic() < deadline
    return dict(reply.json())


def test_a_conversation_goes_on_as_if_all_of_it_were_sent(openai: OpenAI) -> None:
    first = openai.responses.create(input=TALE, instructions="You tell tales.", **GREEDY)
    second = openai.responses.create(input="Go on", previous_response_id=first.id, **GREEDY)
    third = openai.responses.create(
        input=[{"role": "user", "content": "And then?"}],
        instructions="Be brief.",
        previous_response_id=second.id,
        **GREEDY,
    )
    sent: Any = [
        {"role": "user", "content": TALE},
        *first.output,
        {"role": "user", "content": "Go on"},
        *second.output,
        {"role": "user", "content": "And then?"},
    ]
    for response, items, instructions in ((second, sent[:3], None), (third, sent, "Be brief.")):
        whole = openai.responses.create(input=items, instructions=instructions, store=False, **GREEDY)
        assert response.output_text == whole.output_text
        assert response.usage is not None
        assert whole.usage is not None
        assert response.usage.input_tokens == whole.usage.input_tokens
    assert (second.previous_response_id, second.instructions) == (first.id, None)
    assert third.previous_response_id == second.id


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_returned_as_it_was(openai: OpenAI, server: Server, stream: bool) -> None:
    body = {"input": TALE, **GREEDY, "metadata": {"a": "b"}, "include": ["message.output_text.logprobs"]}
    reply = server.request("/v1/responses", {**body, "stream": stream})
    answer = events_of(reply.body)[-1]["response"] if stream else reply.json()
    assert (answer["store"], answer["status"]) == (True, "incomplete")
    found = server.request(f"/v1/responses/{answer['id']}")
    assert (found.status, found.json()) == (200, answer)
    assert openai.responses.retrieve(answer["id"]) == Response.model_validate(answer)
    assert item_texts(openai, answer["id"]) == [TALE]


def test_input_items_come_in_pages(openai: OpenAI, server: Server) -> None:
    first = openai.responses.create(input=TALE, **GREEDY)
    items: Any = [{"role": "user", "content": str(index)} for index in range(5)]
    second = openai.responses.create(input=items, previous_response_id=first.id, **GREEDY)
    expected = [TALE, first.output_text, *"01234"]
    assert item_texts(openai, second.id, order="asc", limit=2) == expected  # the client asks for all pages
    assert item_texts(openai, second.id, limit=3) == expected[::-1]
    page = server.request(f"/v1/responses/{second.id}/input_items?limit=2&order=asc").json()
    assert (page["object"], page["has_more"], len(page["data"])) == ("list", True, 2)
    assert [page["first_id"], page["last_id"]] == [item["id"] for item in page["data"]]
    assert [item["role"] for item in page["data"]] == ["user", "assistant"]
    for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order"), ("after=x", "after"),
                         ("before=x", "before")):  # fmt: skip
        reply = server.request(f"/v1/responses/{second.id}/input_items?{query}")
        assert (reply.status, reply.error["param"]) == (400, param)


def test_a_deleted_response_is_gone_but_not_what_followed(openai: OpenAI, server: Server) -> None:
    first = openai.responses.create(input=TALE, **GREEDY)
    second = openai.responses.create(input="Go on", previous_response_id=first.id, **GREEDY)
    gone = server.request(f"/v1/responses/{first.id}", method="DELETE")
    assert (gone.status, gone.json()) == (200, {"id": first.id, "object": "response", "deleted": True})
    for ask in (openai.responses.retrieve, openai.responses.delete, openai.responses.cancel):
        with pytest.raises(NotFoundError, match=first.id):
            ask(first.id)
    with pytest.raises(NotFoundError, match=first.id):
        openai.responses.input_items.list(first.id)
    with pytest.raises(BadRequestError, match=first.id) as caught:
        openai.responses.create(input="Go on", previous_response_id=first.id, **GREEDY)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
    third = openai.responses.create(input="And then?", previous_response_id=second.id, **GREEDY)
    assert item_texts(openai, third.id, order="asc")[:2] == [TALE, first.output_text]


def test_what_is_not_to_be_stored_is_not(openai: OpenAI, server: Server) -> None:
    first = openai.responses.create(input=TALE, **GREEDY)
    second = openai.responses.create(input="Go on", previous_response_id=first.id, store=False, **GREEDY)
    assert server.request("/v1/responses", {"input": TALE, "store": False, **GREEDY}).json()["store"] is False
    with pytest.raises(NotFoundError, match="store=false"):
        openai.responses.retrieve(second.id)
    with pytest.raises(BadRequestError, match="background=true"):
        openai.responses.cancel(first.id)
    assert server.request(f"/v1/responses/{first.id}?stream=true").error["param"] == "stream"
    assert server.request(f"/v1/responses/{first.id}?nonsense=1").error["param"] == "nonsense"
    assert server.request("/v1/responses/resp_%00%ff").status == 404
    for previous in ("", "x", "resp_\x00", "resp_" + "x" * 1000):
        reply = server.request("/v1/responses", {"input": TALE, "previous_response_id": previous})
        assert (reply.status, reply.error["param"]) == (400, "previous_response_id")


def test_calls_and_their_results_go_on(openai: OpenAI) -> None:
    arguments: Any = {"model": "quire-demo", "tools": [LOOK], "temperature": 0, "parallel_tool_calls": False}
    called = openai.responses.create(input="Rome?", tool_choice="required", **arguments)
    [call] = called.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    told = openai.responses.create(
        input=[result], previous_response_id=called.id, max_output_tokens=5, tool_choice="none", **arguments
    )
    sent: Any = [{"role": "user", "content": "Rome?"}, call, result]
    whole = openai.responses.create(input=sent, max_output_tokens=5, tool_choice="none", **arguments)
    assert told.output_text == whole.output_text
    kinds = [item.type for item in openai.responses.input_items.list(told.id, order="asc")]
    assert kinds == ["message", "function_call", "function_call_output"]
    unknown: Any = [{**result, "call_id": "x"}]
    with pytest.raises(BadRequestError, match="no call before it has this call_id") as caught:
        openai.responses.create(input=unknown, previous_response_id=called.id, **arguments)
    assert caught.value.param == "input[0].call_id"


def test_a_call_that_was_cut_off_is_no_part_of_the_conversation(openai: OpenAI) -> None:
    arguments: Any = {"model": "quire-demo", "tools": [LOOK], "temperature": 0}
    cut = openai.responses.create(input="Rome?", tool_choice="required", max_output_tokens=34, **arguments)
    [call] = cut.output
    assert call.type == "function_call"
    assert call.status == "incomplete"
    told = openai.responses.create(input="Well?", previous_response_id=cut.id, max_output_tokens=3, **arguments)
    assert item_texts(openai, told.id, order="asc") == ["Rome?", "Well?"]


def test_a_stream_that_the_client_leaves_is_kept_as_far_as_it_came(openai: OpenAI, server: Server) -> None:
    arguments: Any = {"model": "quire-demo", "temperature": 0, "extra_body": {"ignore_eos": True}}
    with openai.responses.create(input=TALE, stream=True, max_output_tokens=1900, **arguments) as stream:
        events = iter(stream)
        while (event := next(events)).type != "response.output_text.delta":
            if event.type == "response.created":
                response_id = event.response.id
    kept = ended(server, response_id)
    assert (kept["status"], kept["output"][0]["status"]) == ("cancelled", "incomplete")
    assert kept["output"][0]["content"][0]["text"].startswith(event.delta)
    following = openai.responses.create(input="Go on", previous_response_id=response_id, **GREEDY)
    assert item_texts(openai, following.id, order="asc")[1].startswith(event.delta)


def test_an_api_key_reaches_its_own_responses_only(tmp_path: Path) -> None:
    keys = [argument for key in KEYS for argument in ("--api-key", key)]
    with Server.start("--response-store", str(tmp_path / "responses.db"), *keys) as server:
        one, other = (client_of(server, key) for key in KEYS)
        with one, other:
            mine = one.responses.create(input=TALE, **GREEDY)
            body: Any = {"extra_body": {"request_id": mine.id.removeprefix("resp_")}}
            for ask in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
                with pytest.raises(NotFoundError, match=mine.id):
                    ask(mine.id)
            with pytest.raises(NotFoundError, match=mine.id):
                other.responses.input_items.list(mine.id)
            with pytest.raises(BadRequestError, match="not among the stored responses of this API key"):
                other.responses.create(input="Go on", previous_response_id=mine.id, **GREEDY)
            same_id = other.responses.create(input="Another", **GREEDY, **body)
            assert same_id.id == mine.id
            assert item_texts(one, mine.id) == [TALE]
            assert item_texts(other, mine.id) == ["Another"]


def test_responses_survive_a_crash_and_streams_that_fail(tmp_path: Path) -> None:
    """The model thinks, so that thoughts are stored as well."""
    folder = thinking_model(tmp_path / "thinker", QWEN_THINKING)
    store = ["--response-store", str(tmp_path / "responses.db"), "--model", str(folder)]
    thinks: Any = {"temperature": 1, "seed": 5, "logit_bias": {str(THINK): 100, str(THOUGHT): 7}}
    body = {"input": TALE, "max_output_tokens": 60, **thinks}
    with Server.start(*store) as server:
        first = server.request("/v1/responses", body).json()
        assert "reasoning" in [item["type"] for item in first["output"]]
        server.process.kill()
        server.process.wait(PATIENCE)
    long = {**body, "max_output_tokens": 1900, "ignore_eos": True, "stream": True}
    with Server.start(*store, "--shutdown-timeout", "0") as server:
        assert server.request(f"/v1/responses/{first['id']}").json() == first
        with client_of(server) as openai:
            stream = iter(openai.responses.create(extra_body=long, input=TALE, stream=True))
            failed_id = next(stream).response.id  # type: ignore[union-attr]
            server.process.send_signal(signal.SIGTERM)
            kinds = [event.type for event in stream]
        assert kinds[-2:] == ["error", "response.failed"]
        server.process.wait(PATIENCE)
    with Server.start(*store) as server:
        failed = server.request(f"/v1/responses/{failed_id}").json()
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        refused = server.request("/v1/responses", {"input": "Go on", "previous_response_id": failed_id})
        assert (refused.status, "failed" in refused.error["message"]) == (400, True)
        following = {"input": "Go on", "max_output_tokens": 5, **thinks}
        second = server.request("/v1/responses", {**following, "previous_response_id": first["id"]}).json()
        sent = [{"role": "user", "content": TALE}, *first["output"], {"role": "user", "content": "Go on"}]
        whole = server.request("/v1/responses", {**following, "input": sent}).json()
        assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"]


def test_a_conversation_may_have_the_size_of_a_body(tmp_path: Path) -> None:
    bounds = ["--max-body-bytes", "2000", "--response-store-size", "1MiB", "--response-store-entries", "2"]
    with (
        Server.start("--response-store", str(tmp_path / "responses.db"), *bounds) as server,
        client_of(server) as client,
    ):
        first = client.responses.create(input="x" * 900, **GREEDY)
        second = client.responses.create(input="y" * 900, previous_response_id=first.id, **GREEDY)
        with pytest.raises(BadRequestError, match=r"2000 bytes \(--max-body-bytes\)"):
            client.responses.create(input="Go on", previous_response_id=second.id, **GREEDY)
        client.responses.create(input=TALE, **GREEDY)
        client.responses.create(input=TALE, **GREEDY)
        with pytest.raises(NotFoundError):
            client.responses.retrieve(first.id)


def test_a_response_that_is_too_large_is_answered_and_not_stored(tmp_path: Path) -> None:
    bounds = ["--max-body-bytes", "2000", "--response-store-size", "1MiB"]
    body = {"input": TALE, **GREEDY, "top_logprobs": 20, "include": ["message.output_text.logprobs"]}
    with Server.start("--response-store", str(tmp_path / "responses.db"), *bounds) as server:
        for stream in (False, True):
            reply = server.request("/v1/responses", {**body, "stream": stream})
            answer = events_of(reply.body)[-1]["response"] if stream else reply.json()
            assert (answer["status"], answer["store"]) == ("incomplete", False)
            assert server.request(f"/v1/responses/{answer['id']}").status == 404
        server.stop()
        assert any("could not be stored: it has" in line for line in server.log)


def test_conversations_are_refused_in_words(openai: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="previous_response_id"):
        openai.conversations.create()
    with pytest.raises(NotFoundError, match="previous_response_id"):
        openai.conversations.retrieve("conv_1")
    with pytest.raises(BadRequestError, match="previous_response_id"):
        openai.responses.create(input=TALE, conversation="conv_1", **GREEDY)


def test_the_document_has_the_endpoints_of_the_store(server: Server) -> None:
    paths = server.request("/openapi.json").json()["paths"]
    assert set(paths["/v1/responses/{id}"]) == {"get", "delete"}
    assert set(paths["/v1/responses/{id}/input_items"]) == {"get"}
    wrong = server.request("/v1/responses/resp_1", {})
    assert (wrong.status, wrong.headers["allow"]) == (405, "DELETE, GET, HEAD")
    wrong = server.request("/v1/responses/resp_1/input_items", method="DELETE")
    assert (wrong.status, wrong.headers["allow"]) == (405, "GET, HEAD")


def test_an_id_with_a_slash_is_rejected(server: Server) -> None:
    body = {"input": TALE, **GREEDY, "request_id": "a/b"}
    reply = server.request("/v1/responses", body)
    assert (reply.status, reply.error["param"]) == (400, "request_id")
    assert server.request("/v1/responses", {**body, "store": False}).json()["id"] == "resp_a/b"


def serve(*arguments: str) -> str:
    """Return what a server says that does not start."""
    command = quire_command("serve", "--port", "0", *arguments)
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert (ran.returncode != 0, ran.stdout) == (True, "")
    return " ".join(ran.stderr.split())


def test_a_store_that_cannot_be_used_is_an_error_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE mine (x)")
    assert "it is the database of another program" in serve("--response-store", str(path))
    path.write_text(json.dumps({"not": "a database"} | {str(index): index for index in range(99)}))
    assert "not a database" in serve("--response-store", str(path))
    small = serve("--response-store", str(tmp_path / "x.db"), "--response-store-size", "1MiB")
    assert "give 67108864 or more" in small
