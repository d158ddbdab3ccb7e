"""Replays against our own server, and against one that misbehaves."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from http_server import Server, folder_of_demo_model
from replays import KeptRun, replay, request, until
from rude_server import DONE, Exchange, RudeServer, event

from quire.frontend.evaluation.replay.http_target import HttpOptions, HttpTarget
from quire.frontend.evaluation.replay.load import Load
from quire.frontend.evaluation.replay.record import Outcome, RequestRecord
from quire.frontend.evaluation.replay.runner import Replay
from quire.frontend.evaluation.replay.target import TargetError, TargetInfo
from quire.frontend.evaluation.workload.blocks import Prompts
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.frontend.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server of the demo model."""
    with Server.start("--max-num-seqs", "4", "--max-waiting-requests", "8") as server:
        yield server


def send(options: HttpOptions, requests: list[WorkloadRequest], load: Load | None = None) -> KeptRun:
    """Replay requests against a server."""

    async def main() -> KeptRun:
        target = await HttpTarget.open(options)
        try:
            return await replay(target, requests, load)
        finally:
            await target.close()

    return asyncio.run(main())


def one(answer: Callable[[Exchange], None]) -> RequestRecord:
    """Send a request to a server with this answer, and a second one, which succeeds; return the first record."""

    def first_rude(exchange: Exchange) -> None:
        if len(exchange.server.bodies) == 1:
            answer(exchange)
        else:
            exchange.stream(event("fine", finish_reason="length"), DONE)

    with RudeServer(first_rude) as server:
        kept = send(HttpOptions(server.url), [request(), request()], Load(concurrency=1))
    assert kept.outcomes[1] is Outcome.COMPLETED
    assert kept.interrupted is None
    return kept.in_order[0]


# Our own server


def test_our_server_answers_with_the_requested_tokens(server: Server) -> None:
    requests = [request(prompt=20 + place, output=6, block=place) for place in range(8)]
    kept = send(HttpOptions(server.url), requests, Load(concurrency=4, warm_up=1))
    assert kept.outcomes == [Outcome.COMPLETED] * 8
    for wanted, record in zip(requests, kept.in_order, strict=True):
        assert (record.prompt_tokens, record.output_tokens) == (wanted.prompt_tokens, 6)
        assert record.first_token is not None
        assert record.last_token is not None
        assert record.sent < record.first_token <= record.last_token <= record.ended
        assert sum(record.gaps) == pytest.approx(record.last_token - record.first_token)
    sample = kept.samples[0]
    assert sample.running is not None
    assert sample.pages_total
    assert sample.output_tokens is not None


def test_cached_tokens_are_reported(server: Server) -> None:
    requests = [request(prompt=96, session="one", block=99) for _ in range(2)]
    kept = send(HttpOptions(server.url), requests)
    assert (kept.in_order[1].cached_tokens or 0) >= 64


@pytest.mark.parametrize("options", [{"endpoint": "chat"}, {"prompt_as": "text"}])
def test_prompts_can_be_text(server: Server, options: dict[str, Any]) -> None:
    tokenizer = Tokenizer(str(folder_of_demo_model()))
    kept = send(HttpOptions(server.url, tokenizer=tokenizer, **options), [request(output=5)])
    assert kept.outcomes == [Outcome.COMPLETED]
    assert kept.records[0].output_tokens == 5


def test_messages_and_text_of_the_trace_are_sent(server: Server) -> None:
    chat = request(messages=[{"role": "user", "content": "Tell me a tale."}])
    assert send(HttpOptions(server.url, endpoint="chat"), [chat]).outcomes == [Outcome.COMPLETED]
    assert send(HttpOptions(server.url), [request(text="Once upon a time")]).outcomes == [Outcome.COMPLETED]
    kept = send(HttpOptions(server.url), [chat])
    assert "--endpoint-type chat" in (kept.records[0].error or "")


def test_an_overloaded_server_refuses_and_one_too_long_fails(server: Server) -> None:
    requests = [request(prompt=30, output=100, block=place) for place in range(40)]
    kept = send(HttpOptions(server.url), [request(prompt=5000), *requests])
    assert kept.outcomes[0] is Outcome.ERRORED
    assert "400" in (kept.in_order[0].error or "")
    assert "2048" in (kept.in_order[0].error or "")
    assert {*kept.outcomes[1:]} == {Outcome.COMPLETED, Outcome.REFUSED}


def test_late_requests_are_aborted_in_the_server(server: Server) -> None:
    kept = send(HttpOptions(server.url), [request(prompt=500, output=1500)], Load(request_timeout=0.05))
    assert kept.outcomes == [Outcome.LATE]
    server.check_pages()


def test_a_killed_server_ends_the_run_with_the_results_so_far() -> None:
    async def main(server: Server) -> KeptRun:
        target = await HttpTarget.open(HttpOptions(server.url))
        kept = KeptRun()
        run = Replay(target, kept, Prompts(1000).tokens, Load())
        requests = [request(), *(request(0.2, output=1900, block=place) for place in range(1, 5)), request(1e6)]
        running = asyncio.create_task(run.run(requests))
        await until(lambda: len(run.open) == 4 and run.outcomes)
        server.process.send_signal(signal.SIGKILL)
        assert "is gone" in str(await running)
        await target.close()
        return kept

    with Server.start() as server:
        kept = asyncio.run(main(server))
        server.process.wait()
    assert kept.outcomes == [Outcome.COMPLETED] + [Outcome.ERRORED] * 4 + [Outcome.UNFINISHED]
    assert kept.interrupted


# A server that misbehaves


def test_a_broken_stream_fails_and_keeps_its_tokens() -> None:
    def answer(exchange: Exchange) -> None:
        exchange.begin(Transfer_Encoding="chunked")
        exchange.chunk(event("a"))
        exchange.chunk(event("b")[:-9])
        exchange.drop()

    record = one(answer)
    assert record.outcome is Outcome.ERRORED
    assert record.output_tokens == 1
    assert "broke the connection" in (record.error or "")


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([b"data: {rubbish\n\n"], "not a chunk of an answer"),
        ([b'data: {"choices": 3}\n\n'], "not a chunk of an answer"),
        ([event("a")], "ended before the answer did"),
        ([DONE], "no tokens"),
        ([event("a"), b'data: {"error": {"message": "out of luck"}}\n\n', DONE], "out of luck"),
        ([b'data: {"error": "plain words"}\n\n', DONE], "plain words"),
    ],
)
def test_a_stream_of_rubbish_fails(pieces: list[bytes], error: str) -> None:
    record = one(lambda exchange: exchange.stream(*pieces))
    assert record.outcome is Outcome.ERRORED
    assert error in (record.error or "")


@pytest.mark.parametrize("status", [429, 503])
def test_refusals_are_counted_as_such(status: int) -> None:
    body = json.dumps({"error": {"message": "come back later", "type": "x", "param": None, "code": None}}).encode()
    record = one(lambda exchange: exchange.whole(status, body))
    assert record.outcome is Outcome.REFUSED
    assert record.error == f"status {status}: come back later"


@pytest.mark.parametrize(("status", "body"), [(400, b'{"message": "no"}'), (500, b"<h1>no</h1>"), (302, b"no")])
def test_other_statuses_fail(status: int, body: bytes) -> None:
    record = one(lambda exchange: exchange.whole(status, body))
    assert record.outcome is Outcome.ERRORED
    assert f"status {status}" in (record.error or "")
    assert "no" in (record.error or "")


def test_an_answer_that_is_not_http_fails() -> None:
    def answer(exchange: Exchange) -> None:
        exchange.wfile.write(b"SSH-2.0-OpenSSH\r\n")
        exchange.drop()

    record = one(answer)
    assert record.outcome is Outcome.ERRORED
    assert "not HTTP" in (record.error or "")


def test_events_in_any_pieces_are_the_same_answer() -> None:
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 5}}
    whole = b": a comment\n\n" + event("a") + event("") + event("b", finish_reason="length")
    whole = (whole + event(usage=usage) + DONE).replace(b"\n", b"\r\n")
    record = one(lambda exchange: exchange.stream(*(whole[place : place + 1] for place in range(len(whole)))))
    assert record.outcome is Outcome.COMPLETED
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (11, 7, 5)


def test_without_usage_chunks_with_tokens_are_counted() -> None:
    record = one(lambda exchange: exchange.stream(event("a"), event("b"), event("", finish_reason="stop"), DONE))
    assert record.output_tokens == 2


def test_connections_are_kept_and_renewed_when_the_server_has_closed_them() -> None:
    def answer(exchange: Exchange) -> None:
        exchange.stream(event("a", finish_reason="length"), DONE)
        if len(exchange.server.bodies) == 3:
            exchange.drop()  # without announcing it

    with RudeServer(answer) as server:
        kept = send(HttpOptions(server.url), [request() for _ in range(6)], Load(concurrency=1))
        assert kept.outcomes == [Outcome.COMPLETED] * 6
        assert len(server.connections) == 2


def test_an_answer_may_end_with_its_connection() -> None:
    def answer(exchange: Exchange) -> None:
        exchange.begin(Content_Type="text/event-stream", Connection="close")
        exchange.wfile.write(event("a") + event("b", finish_reason="length") + DONE)

    record = one(answer)
    assert (record.outcome, record.output_tokens) == (Outcome.COMPLETED, 2)


def test_an_answer_that_ends_too_soon_with_its_connection_fails() -> None:
    def answer(exchange: Exchange) -> None:
        exchange.begin(Content_Type="text/event-stream", Connection="close")
        exchange.wfile.write(event("a"))

    record = one(answer)
    assert (record.outcome, record.error) == (Outcome.ERRORED, "the stream ended before the answer did")


def test_an_answer_shorter_than_its_length_fails() -> None:
    def answer(exchange: Exchange) -> None:
        exchange.begin(Content_Length="1000", Connection="close")
        exchange.wfile.write(event("a", finish_reason="length") + DONE)

    record = one(answer)
    assert record.outcome is Outcome.ERRORED
    assert "broke the connection" in (record.error or "")


def test_key_headers_and_fields_are_sent() -> None:
    extra = {"top_k": 7, "ignore_eos": None}
    with RudeServer(lambda exchange: exchange.stream(event("a", finish_reason="length"), DONE)) as server:
        options = HttpOptions(server.url + "/v1/", api_key="secret", headers={"X-Tenant": "me"}, extra_body=extra)
        send(options, [request(params={"temperature": 0.5, "n": 3})])
        (body,), (headers,) = server.bodies, server.headers
    assert (headers["Authorization"], headers["X-Tenant"]) == ("Bearer secret", "me")
    assert body["model"] == "rude"
    assert (body["temperature"], body["top_k"], body["max_tokens"], len(body["prompt"])) == (0.5, 7, 4, 8)
    assert "n" not in body
    assert "ignore_eos" not in body


def test_a_server_without_metrics_gives_no_samples() -> None:
    with RudeServer(lambda exchange: exchange.stream(event("a", finish_reason="length"), DONE)) as server:
        assert not send(HttpOptions(server.url), [request()]).samples


def test_the_targets_properties_come_from_the_server() -> None:
    pages: dict[str, Any] = {
        "/v1/models": {"data": [{"id": "m", "meta": {"n_vocab": 77, "n_ctx_train": 4096}}, {"id": "other"}]}
    }
    with RudeServer(lambda exchange: None) as server:
        server.pages = pages
        info = described(HttpOptions(server.url))
        assert (info.model, info.vocab_size, info.max_model_len, info.build) == ("m", 77, None, None)
        assert described(HttpOptions(server.url, model="other")).vocab_size is None
        assert described(HttpOptions(server.url, model="unlisted")).model == "unlisted"
        pages["/props"] = {"default_generation_settings": {"n_ctx": 512}}
        assert described(HttpOptions(server.url)).max_model_len == 512
        pages["/props"]["build_info"] = "b4242-0a1b2c3d"
        pages["/v1/models"]["data"][0]["owned_by"] = "llamacpp"
        assert described(HttpOptions(server.url)).build == "llamacpp b4242-0a1b2c3d"
        pages["/version"] = {"version": "0.32.0"}
        assert described(HttpOptions(server.url)).build == "llamacpp 0.32.0"
        pages["/version"], pages["/props"] = {"version": ["?"]}, "?"
        info = described(HttpOptions(server.url))
        assert (info.build, info.max_model_len) == ("llamacpp", None)
        server.pages = {"/v1/models": {"data": []}}
        with pytest.raises(TargetError, match="--model"):
            described(HttpOptions(server.url))
        server.pages = {"/v1/models": {"models": 3}}
        with pytest.raises(TargetError, match="not OpenAI-compatible"):
            described(HttpOptions(server.url))


def described(options: HttpOptions) -> TargetInfo:
    """Return the properties of a server."""

    async def main() -> TargetInfo:
        target = await HttpTarget.open(options)
        await target.close()
        return target.info

    return asyncio.run(main())


def test_a_missing_server_is_an_error_before_anything_is_sent() -> None:
    with RudeServer(lambda exchange: None) as server:
        url = server.url
    with pytest.raises(TargetError, match="no server answers"):
        send(HttpOptions(url), [request()])


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:port", "http://host/?a=1"])
def test_an_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(ValueError, match="base_url"):
        send(HttpOptions(url), [request()])
