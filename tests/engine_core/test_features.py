"""The hooks of features: when the engine calls which, and that it answers what no feature takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from paged_executor import Engine

from quire.engine_core.engine import EngineCore
from quire.engine_core.feature import Feature, hooks
from quire.protocol.messages import Abort, Goodbye, KvAck, KvFetch, KvFetched, UtilityCall, UtilityResult


class Recorder(Feature):
    """A feature that writes down the hooks that are called; see `recorded`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.seconds: list[float | None] = []

    @property
    def utilities(self) -> dict[str, Callable[[bytes, UtilityCall], object]]:
        return {"recorded": lambda _client_id, _call: len(self.calls)}

    def may_share(self, running: Iterable[Any]) -> Iterable[Any]:
        self.calls.append("may_share")
        return running

    def end_step(self, batch: Any, seconds: float | None) -> None:
        self.calls.append("end_step")
        self.seconds.append(seconds)


def _recording(name: str, result: object = None) -> Callable[..., object]:
    def hook(feature: Recorder, *_arguments: object) -> object:
        feature.calls.append(name)
        return result

    hook.__name__ = name
    return hook


_RESULTS: dict[str, object] = {"free_idle_pages": False, "receive": False, "stats": {}, "stop": True}
for _name in [
    "attach", "check", "add", "remove", "choose_alone", "extend", "scheduled", "begin_step", "update", "report",
    "receive_kv", "report_sent", "forget", "count", *_RESULTS,
]:  # fmt: skip
    setattr(Recorder, _name, _recording(_name, _RESULTS.get(_name)))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def engine(recorder: Recorder) -> Engine:
    return Engine(features=[recorder])


def recorded(recorder: Recorder) -> list[str]:
    """Return the hooks called since the last time, without those that may be called several times a step."""
    calls, recorder.calls = recorder.calls, []
    return [call for call in calls if call != "may_share"]


def test_a_request_from_its_message_to_its_end(engine: Engine, recorder: Recorder) -> None:
    assert recorded(recorder) == ["attach"]
    engine.add("0", [1, 2, 3], max_tokens=2)
    assert recorded(recorder) == ["check", "add"]
    step = ["choose_alone", "extend", "scheduled", "begin_step", "end_step", "update", "report"]
    engine.step()
    assert recorded(recorder) == step
    engine.step()
    assert recorded(recorder) == [*step[:4], "remove", *step[4:]]
    assert recorder.seconds == [0.0, 0.0]
    engine.step()  # of nothing
    assert recorded(recorder) == ["choose_alone", "extend", "scheduled", "update", "report"]


def test_a_failed_step_ends_too(engine: Engine, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, failures = engine.executor.submit, [RuntimeError("out of luck")]

    def failing_submit(step: Any) -> Any:
        if failures:
            raise failures.pop()
        return submit(step)

    monkeypatch.setattr(engine.executor, "submit", failing_submit)
    engine.add("0", [1, 2, 3], max_tokens=2)
    recorded(recorder)
    engine.step()
    assert recorded(recorder) == [
        "choose_alone", "extend", "scheduled", "begin_step", "begin_step", "end_step", "update", "report",
    ]  # fmt: skip
    assert recorder.seconds == [None]


def test_aborted_requests_and_clients_that_leave(engine: Engine, recorder: Recorder) -> None:
    for name in "012":
        engine.add(name, [1, 2, 3])
    recorded(recorder)
    engine.core.receive(b"client", Abort(["1"]))
    assert recorded(recorder) == ["remove"]
    engine.core.receive(b"client", Goodbye())
    assert recorded(recorder) == ["remove", "remove", "forget"]


def test_the_end_of_an_engine(engine: Engine, recorder: Recorder) -> None:
    engine.add("0", [1, 2, 3])
    recorded(recorder)
    engine.core.end_all("it failed")
    assert recorded(recorder) == ["remove", "report"]
    assert engine.core.stop()
    assert recorded(recorder) == ["stop"]


def test_pages_calls_and_messages(engine: Engine, recorder: Recorder) -> None:
    recorded(recorder)
    engine.core.receive_kv(b"peer", KvAck(1, 1))
    assert recorded(recorder) == ["receive_kv"]
    engine.core.report_sent(b"router")
    assert recorded(recorder) == ["report_sent"]
    assert engine.num_wakes == 1
    assert engine.core.totals.prompt_tokens == 0
    assert recorded(recorder) == ["count"]
    engine.core.receive(b"client", UtilityCall(7, "recorded"))
    assert engine.sent[b"client"] == [UtilityResult(7, 0)]
    engine.expect_no_output()
    for name in range(4):
        engine.add(f"{name}", [name] * 90, max_tokens=60)
    for _ in range(60):
        engine.step()
    assert "free_idle_pages" in recorded(recorder)


def test_a_fetch_that_no_feature_takes_is_answered(engine: Engine) -> None:
    sent: list[object] = []
    core = EngineCore(engine.executor, engine.limits, lambda _client_id, message: sent.append(message))
    core.receive(b"peer", KvFetch(5, [1] * 9, "salt", 0, 2))
    assert sent == [KvFetched(5, "this engine serves no KV pages")]


def test_hooks_that_no_feature_overrides_are_not_called() -> None:
    feature = Feature()
    assert hooks([feature], Feature.add) == []
