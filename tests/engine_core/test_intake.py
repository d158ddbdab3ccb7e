"""Requests that the socket's thread lets in while the step loop is busy: no id gets two terminal outputs."""

from __future__ import annotations

from paged_executor import Engine

from quire.protocol.messages import EngineCoreOutputs, EngineCoreRequest, ErrorMessage, FinishReason, SamplingParams


def message(request_id: str) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, [1, 2], SamplingParams(seed=0, max_tokens=2))


def send(engine: Engine, request_id: str) -> None:
    assert engine.core.reject_early(b"client", message(request_id)) is None
    engine.core.receive(b"client", message(request_id))


def full_engine() -> Engine:
    """One request runs, and the queue has room for one more."""
    engine = Engine(max_num_seqs=1, max_waiting_requests=1)
    send(engine, "runs")
    engine.step()
    return engine


def test_an_id_that_waits_in_the_inbox_is_in_use() -> None:
    engine = full_engine()
    sent = [message("a"), message("a"), message("a")]
    assert [engine.core.reject_early(b"client", request) for request in sent] == [None] * 3
    for request in sent:
        engine.core.receive(b"client", request)
    assert [type(answer) for answer in engine.sent[b"client"]].count(ErrorMessage) == 2
    engine.finish()
    assert engine.end("a").finish_reason is FinishReason.LENGTH
    assert len(engine.tokens("a")) == 2


def test_the_same_id_of_another_client_and_another_id_are_rejected_at_once() -> None:
    engine = full_engine()
    engine.core.reject_early(b"client", message("a"))
    for client_id, request_id in ((b"other", "a"), (b"client", "b")):
        answer = engine.core.reject_early(client_id, message(request_id))
        assert isinstance(answer, EngineCoreOutputs)
        assert "1 requests with 2 prompt tokens are waiting" in (answer.outputs[0].error or "")


def test_an_id_is_free_again_when_all_that_had_it_are_answered() -> None:
    engine = full_engine()
    send(engine, "a")
    send(engine, "a")
    engine.finish()
    send(engine, "runs again")
    engine.step()
    send(engine, "waits")
    assert engine.core.reject_early(b"client", message("a")) is not None
