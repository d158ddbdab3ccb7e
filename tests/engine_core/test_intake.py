"""Requests that the socket's thread accepts while the step loop is busy: no id gets two terminal outputs."""

from __future__ import annotations

import itertools

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
    assert engine.core.reject_early(b"client", message("a")) is None
    assert engine.core.is_open(b"client", "a")
    assert [type(engine.core.reject_early(b"client", message("a"))) for _ in range(2)] == [ErrorMessage] * 2
    engine.core.receive(b"client", message("a"))
    assert engine.core.is_open(b"client", "a")
    engine.finish()
    assert not engine.core.is_open(b"client", "a")
    assert engine.end("a").finish_reason is FinishReason.LENGTH
    assert len(engine.tokens("a")) == 2


def test_an_id_that_waits_beside_room_is_in_use_too() -> None:
    engine = Engine()
    for _ in range(3):
        assert engine.core.reject_early(b"client", message("a")) is None
    for _ in range(3):
        engine.core.receive(b"client", message("a"))
    assert [type(answer) for answer in engine.sent[b"client"]].count(ErrorMessage) == 2
    engine.finish()
    assert len(engine.tokens("a")) == 2


def test_another_id_is_rejected_at_once() -> None:
    engine = full_engine()
    engine.core.reject_early(b"client", message("a"))
    answer = engine.core.reject_early(b"client", message("b"))
    assert isinstance(answer, EngineCoreOutputs)
    assert "1 requests with 2 prompt tokens are waiting" in (answer.outputs[0].error or "")


def test_a_client_that_fills_the_queue_leaves_others_their_share() -> None:
    engine, ids = Engine(max_waiting_requests=10), map(str, itertools.count())

    def num_accepted(client_id: bytes, tenant: str = "") -> int:
        requests = [EngineCoreRequest(next(ids), [1], SamplingParams(), tenant=tenant) for _ in range(20)]
        return [engine.core.reject_early(client_id, request) is None for request in requests].count(True)

    assert [num_accepted(*who) for who in ((b"one",), (b"one", "key"), (b"two",), (b"one",))] == [10, 5, 3, 0]


def test_a_queue_that_is_full_of_tokens_has_room_for_another_client() -> None:
    engine = Engine(max_waiting_tokens=100, max_num_seqs=1)
    engine.add("runs", [1] * 90, b"one")
    engine.step()
    for name in ("waits", "rejected"):
        engine.add(name, [1] * 90, b"one")
    engine.add("large", [1] * 51, b"two")
    engine.add("waits", [1] * 50, b"two")
    engine.finish()
    assert (engine.end("rejected", b"one").error or "").startswith("the engine is overloaded")
    assert (engine.end("large", b"two").error or "").startswith("the engine is overloaded")
    for client_id in (b"one", b"two"):
        assert engine.end("waits", client_id).error is None


def test_the_waiting_requests_of_each_client_may_be_bounded() -> None:
    engine = Engine(max_num_seqs=1, max_waiting_requests_per_client=2)
    for index in range(3):
        engine.add(str(index), [1], b"one")
        engine.add(str(index), [1], b"two")
    engine.core.flush()
    for client_id in (b"one", b"two"):
        assert "2 requests of this client are waiting, and 2 may" in (engine.end("2", client_id).error or "")
    engine.finish()
    assert engine.end("1", b"one").error is None


def test_the_name_of_a_tenant_has_a_limit() -> None:
    engine = Engine()
    engine.add("a", [1], tenant="x" * 257)
    assert engine.end_now("a").error == "tenant has 257 characters; it may have 256"


def test_an_id_is_free_again_when_all_that_had_it_are_answered() -> None:
    engine = Engine(max_num_seqs=1, max_waiting_requests=2)
    for request_id in ("runs", "a", "a"):
        send(engine, request_id)
        engine.step()
    engine.finish()
    send(engine, "runs again")
    engine.step()
    send(engine, "waits")
    send(engine, "waits too")
    assert isinstance(engine.core.reject_early(b"client", message("a")), EngineCoreOutputs)


def test_of_more_clients_than_may_wait_no_more_get_in() -> None:
    engine = Engine(max_waiting_requests=3)
    requests = [EngineCoreRequest(name, [1], SamplingParams(), tenant=name) for name in "abcdef"]
    accepted = [engine.core.reject_early(b"one", request) is None for request in requests]
    assert accepted == [True, True, True, False, False, False]


def test_an_adapter_is_rejected_where_no_feature_takes_any() -> None:
    """It is not answered by the base model."""
    engine = Engine()
    engine.core.receive(b"client", EngineCoreRequest("a", [1], SamplingParams(max_tokens=1), adapter="/tales"))
    engine.core.flush()
    end = engine.end("a")
    assert end.finish_reason is FinishReason.ERROR
    assert "adapter='/tales': this engine was started without adapters; leave it out, or start" in (end.error or "")
