"""The client of an engine, against a fake engine."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from pathlib import Path

import msgspec
import pytest
from engine_watch import wait_until
from fake_engine import FakeEngine, ready
from patience import PATIENCE

from quire.frontend.client.engine_client import CoreClient, EngineAway, EngineBack, ReconnectPolicy
from quire.frontend.client.routing import FIRST_SESSION, Session
from quire.frontend.errors import EngineConnectionError, EngineDeadError
from quire.protocol.errors import AddressError
from quire.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineGoodbye,
    ErrorMessage,
    Goodbye,
    Hello,
    Ping,
    SchedulerStats,
    StepTrace,
    UtilityCall,
    UtilityResult,
)


def test_the_client_sends_hello_and_gets_ready() -> None:
    with FakeEngine() as engine:
        future = engine.connect()
        assert engine.receive(Hello).protocol_version == PROTOCOL_VERSION
        engine.send(ready())
        client = future.result(PATIENCE)
        assert client.ready == ready()
        client.close()
        engine.receive(Goodbye)


def test_outputs_are_delivered_in_order_and_statistics_are_kept() -> None:
    with FakeEngine() as engine:
        client = engine.attach()
        sent = [EngineCoreOutputs([EngineCoreOutput("r", [i])], SchedulerStats(step=i)) for i in range(100)]
        for message in sent:
            engine.send(message)
        assert [engine.delivered() for _ in sent] == sent
        assert client.last_stats == SchedulerStats(step=99)


def test_traces_go_to_their_subscriber_until_the_last() -> None:
    with FakeEngine() as engine:
        client = engine.attach()
        engine.send(StepTrace(0.0))  # no subscription
        engine.send(EngineCoreOutputs([]))
        engine.delivered()
        seen: queue.SimpleQueue[StepTrace] = queue.SimpleQueue()
        client.start_trace(seen.put)
        assert engine.receive(UtilityCall).method == "trace_start"
        traces = [StepTrace(1.0), StepTrace(2.0, dropped=3), StepTrace(3.0, last=True)]
        for trace in [*traces, StepTrace(4.0)]:
            engine.send(trace)
        engine.send(EngineCoreOutputs([]))
        engine.delivered()
        assert [seen.get(timeout=PATIENCE) for _ in traces] == traces
        assert seen.empty()


def test_a_trace_is_requested_again_after_the_engine_dropped_the_client() -> None:
    with FakeEngine() as engine:
        client = engine.attach(reconnect=ReconnectPolicy(PATIENCE))
        client.start_trace(lambda trace: None)
        engine.receive(UtilityCall)
        engine.send(ErrorMessage("the engine does not know this connection", fatal=True))
        engine.receive(Hello)
        engine.send(ready())
        assert engine.receive(UtilityCall).method == "trace_start"


def test_messages_are_sent_in_order_from_any_thread() -> None:
    with FakeEngine() as engine:
        client = engine.attach()

        def send(name: str) -> None:
            for i in range(200):
                client.send(Abort([f"{name}{i}"]))

        threads = [threading.Thread(target=send, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        received = [engine.receive(Abort).request_ids[0] for _ in range(400)]
        for name in "ab":
            assert [each for each in received if each[0] == name] == [f"{name}{i}" for i in range(200)]


def test_more_messages_than_the_socket_holds_all_arrive() -> None:
    with FakeEngine() as engine:
        client = engine.attach()
        for i in range(5000):
            client.send(Abort([str(i)]))
        assert [engine.receive(Abort).request_ids for _ in range(5000)] == [[str(i)] for i in range(5000)]


SILENT_HEARTBEATS = "quire.frontend.client.engine_client.SILENT_HEARTBEATS"


def test_heartbeats_are_sent_without_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SILENT_HEARTBEATS, math.inf)
    with FakeEngine() as engine:
        engine.attach(heartbeat=0.01)
        for _ in range(3):
            engine.receive(Ping)


def test_a_utility_call_has_a_result_or_the_error_of_the_engine() -> None:
    with FakeEngine() as engine:
        client = engine.attach()
        good, bad = client.call("stats"), client.call("dance")
        calls = [engine.receive(UtilityCall) for _ in range(2)]
        assert [call.method for call in calls] == ["stats", "dance"]
        engine.send(UtilityResult(calls[1].call_id, error="there is no dance"))
        engine.send(UtilityResult(calls[0].call_id, {"step": 3}))
        assert good.result(PATIENCE) == {"step": 3}
        with pytest.raises(RuntimeError, match="there is no dance"):
            bad.result(PATIENCE)


def test_a_wrong_version_raises_the_message_of_the_engine() -> None:
    with FakeEngine() as engine:
        future = engine.connect()
        engine.receive(Hello)
        engine.send(ErrorMessage("protocol version 1 is not spoken here, only 2", fatal=True))
        with pytest.raises(EngineConnectionError, match="only 2"):
            future.result(PATIENCE)


def test_a_missing_engine_is_reported_at_once(tmp_path: Path) -> None:
    before = time.monotonic()
    for address in (f"ipc://{tmp_path}/absent.sock", "tcp://127.0.0.1:1"):
        with pytest.raises((EngineConnectionError, AddressError), match=r"no engine listens|tcp"):
            CoreClient(address, lambda _: None, timeout=PATIENCE)
    assert time.monotonic() - before < PATIENCE


def test_an_engine_that_does_not_answer_is_an_error() -> None:
    with FakeEngine() as engine, pytest.raises(EngineConnectionError, match=r"did not answer within 0\.1 s"):
        engine.connect(timeout=0.1).result(PATIENCE)


def test_a_silent_engine_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SILENT_HEARTBEATS, math.inf)
    with FakeEngine() as engine:
        client = engine.attach(heartbeat=0.01)
        call = client.call("stats")
        monkeypatch.setattr(SILENT_HEARTBEATS, 10)
        error = engine.delivered()
        assert isinstance(error, EngineDeadError)
        assert "has not answered" in str(error)
        with pytest.raises(EngineDeadError, match="has not answered"):
            client.send(Abort(["r"]))
        with pytest.raises(EngineDeadError, match="has not answered"):
            call.result(PATIENCE)


def test_an_engine_that_dies_is_dead_at_once_after_its_last_messages() -> None:
    with FakeEngine() as engine:
        client = engine.attach()
        last = EngineCoreOutputs([EngineCoreOutput("r", [1])])
        engine.send(last)
        assert engine.delivered() == last
        engine.die()
        error = engine.delivered()
        assert isinstance(error, EngineDeadError)
        assert "has gone" in str(error)
        with pytest.raises(EngineDeadError):
            client.call("stats")


def test_an_engine_that_says_goodbye_is_dead() -> None:
    with FakeEngine() as engine:
        engine.attach()
        engine.send(EngineGoodbye("it was told to"))
        error = engine.delivered()
        assert isinstance(error, EngineDeadError)
        assert "it was told to" in str(error)


def test_a_client_that_was_dropped_begins_a_new_session() -> None:
    with FakeEngine() as engine:
        client = engine.attach(reconnect=ReconnectPolicy(PATIENCE))
        client.send(Abort(["r"]), FIRST_SESSION)
        engine.receive(Abort)
        engine.send(ErrorMessage("say Hello first", fatal=True))
        away = engine.delivered()
        assert isinstance(away, EngineAway)
        assert away.reason == "the connection to the engine was lost"
        with pytest.raises(EngineDeadError, match="being started again"):
            client.call("stats")
        client.send(Abort(["late"]), FIRST_SESSION)  # dropped: its session is over
        engine.receive(Hello)
        engine.send(ready())
        while isinstance(back := engine.delivered(), EngineAway):
            pass
        assert back == EngineBack(Session(0, 2), ready().block_size, engine.address)
        client.send(Abort(["late"]), FIRST_SESSION)
        client.send(Abort(["s"]), Session(0, 2))
        assert engine.receive(Abort).request_ids == ["s"]


def test_an_engine_that_comes_back_with_another_model_is_another_engine() -> None:
    with FakeEngine() as engine:
        engine.attach(reconnect=ReconnectPolicy(PATIENCE))
        engine.send(ErrorMessage("say Hello first", fatal=True))
        engine.receive(Hello)
        engine.send(msgspec.structs.replace(ready(), vocab_size=7))
        while isinstance(error := engine.delivered(), EngineAway):
            pass
        assert isinstance(error, EngineDeadError)
        assert "another model" in str(error)


def test_an_engine_that_does_not_come_back_in_time_is_dead() -> None:
    with FakeEngine() as engine:
        client = engine.attach(reconnect=ReconnectPolicy(0.1))
        call = client.call("stats")
        engine.die()
        while isinstance(error := engine.delivered(), EngineAway):
            pass
        assert isinstance(error, EngineDeadError)
        assert "no engine has come back within 0.1 s" in str(error)
        with pytest.raises(EngineDeadError, match="lost"):
            call.result(PATIENCE)


def test_an_error_in_deliver_ends_the_client() -> None:
    with FakeEngine() as engine:

        def deliver(delivery: object) -> None:
            if isinstance(delivery, EngineCoreOutputs):
                raise ZeroDivisionError("in deliver")
            engine.deliveries.put(delivery)  # type: ignore[arg-type]

        future = engine._pool.submit(CoreClient, engine.address, deliver, timeout=PATIENCE)
        engine.receive(Hello)
        engine.send(ready())
        client = future.result(PATIENCE)
        engine.send(EngineCoreOutputs([]))
        assert "in deliver" in str(engine.delivered())
        client.close()


def test_closing_is_idempotent_and_leaves_no_thread_or_file_descriptor() -> None:
    with FakeEngine() as engine:
        engine.attach().close()
        engine.receive(Goodbye)
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            client = engine.attach()
            client.close()
            client.close()
            engine.receive(Goodbye)
        wait_until(lambda: threading.active_count() == threads, "a thread is left")
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files, "a file is left open")  # zmq's threads close them
