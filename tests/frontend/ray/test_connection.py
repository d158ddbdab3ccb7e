"""The ingress's connection, against replicas that say what a test tells them to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import pytest
from patience import PATIENCE

from quire.frontend.ray import connection
from quire.frontend.ray.connection import ReplicaConnection
from quire.frontend.ray.ingress import ReplicatedLLM
from quire.frontend.ray.replica import CLOCK
from quire.protocol.codec import EngineDecoder, encode
from quire.protocol.messages import (
    Abort,
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineMessage,
    ErrorKind,
    EventType,
    FinishReason,
    Ping,
    Pong,
    SamplingParams,
    UtilityCall,
    UtilityResult,
)

REQUEST = EngineCoreRequest("7", [1, 2, 3], SamplingParams(max_tokens=50, prompt_logprobs=1), identity=5)
END = EngineCoreOutput("", [9], finish_reason=FinishReason.LENGTH)
STATS_OF_TWO = {"step": 2, "totals": {"a": [2, 4], "bounds": [5]}}
STUCK = "stuck"
"""The end of a call that says nothing more."""

FROZEN = "frozen"
"""The only item of a call that no replica takes."""

Script = Sequence[EngineCoreOutput | Exception | str]


class ScriptedCall:
    """A call with these outputs and this end."""

    def __init__(self, script: Script, clock: float) -> None:
        self.is_cancelled = False
        self._script = script
        self._clock = clock

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if FROZEN in self._script:
            await asyncio.Event().wait()
        yield CLOCK.pack(self._clock)
        for each in self._script:
            if isinstance(each, Exception):
                raise each
            if isinstance(each, str):
                await asyncio.Event().wait()
            else:
                yield bytes(encode(EngineCoreOutputs([each], None, 1000.0))[0])

    def cancel(self) -> None:
        """See `ReplicaCall`."""
        self.is_cancelled = True


class ScriptedReplicas:
    """Replicas whose calls go by the scripts, one after the other; the last is repeated."""

    def __init__(self, *scripts: Script, clock: float = 0.0, results: Sequence[bytes | Exception] = ()) -> None:
        self.requests: list[EngineCoreRequest] = []
        self.calls: list[ScriptedCall] = []
        self._scripts = scripts
        self._clock = clock
        self._results = results

    def relay(self, frame: bytes, text_files: str) -> ScriptedCall:
        """See `Replicas`."""
        del text_files
        request = EngineDecoder().decode([frame])
        assert isinstance(request, EngineCoreRequest)
        self.requests.append(request)
        script = self._scripts[min(len(self.calls), len(self._scripts) - 1)]
        self.calls.append(ScriptedCall(script, self._clock))
        return self.calls[-1]

    async def describe(self) -> bytes:
        """See `Replicas`."""
        raise NotImplementedError

    async def call_all(self, frame: bytes) -> Sequence[bytes | Exception]:
        """See `Replicas`."""
        del frame
        return self._results


@contextmanager
def _connected(replicas: ScriptedReplicas) -> Iterator[ReplicaConnection]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    made = ReplicaConnection(replicas, loop)
    try:
        yield made
    finally:
        made.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _receive(made: ReplicaConnection, is_last: Callable[[EngineMessage], bool]) -> list[EngineMessage]:
    found: list[EngineMessage] = []
    while not found or not is_last(found[-1]):
        messages = made.exchange(PATIENCE)
        assert messages
        found += messages
    return found


def _serve(replicas: ScriptedReplicas, request: EngineCoreRequest = REQUEST) -> list[EngineCoreOutput]:
    """Send a request; return its outputs, up to the last."""

    def is_last(message: EngineMessage) -> bool:
        assert isinstance(message, EngineCoreOutputs)
        return message.outputs[-1].finish_reason is not None

    with _connected(replicas) as made:
        made.post(encode(request))
        found = _receive(made, is_last)
    outputs = [output for message in found if isinstance(message, EngineCoreOutputs) for output in message.outputs]
    assert {output.request_id for output in outputs} == {"7"}
    return outputs


@pytest.mark.parametrize(
    "loss",
    [
        [RuntimeError("the actor died")],
        [],  # the engine died
        [EngineCoreOutput("", finish_reason=FinishReason.ABORT)],  # the engine was stopped
        [EngineCoreOutput("", finish_reason=FinishReason.ERROR, error="ends", error_kind=ErrorKind.SHUTTING_DOWN)],
    ],
)
def test_a_lost_request_is_sent_again_with_the_tokens_that_have_come(loss: Script) -> None:
    replicas = ScriptedReplicas([EngineCoreOutput("", [4, 5]), *loss], [EngineCoreOutput("", [6]), *loss], [END])
    outputs = _serve(replicas)
    assert [token for output in outputs for token in output.new_token_ids] == [4, 5, 6, 9]
    assert [request.generated_token_ids for request in replicas.requests] == [[], [4, 5], [4, 5, 6]]
    assert [request.sampling_params.prompt_logprobs for request in replicas.requests] == [1, None, None]
    assert {request.identity for request in replicas.requests} == {5}
    assert len({request.request_id for request in replicas.requests}) == 3


def test_a_request_that_is_always_lost_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_LONGEST_PAUSE", 0.0)
    replicas = ScriptedReplicas([RuntimeError("the actor died")])
    (output,) = _serve(replicas)
    assert output.finish_reason is FinishReason.ERROR
    assert "10 times in a row" in (output.error or "")
    assert "the actor died" not in (output.error or "")  # it may hold addresses, which are for the log
    assert len(replicas.calls) == 10


def test_a_request_without_an_engine_ends_when_its_time_is_up() -> None:
    (output,) = _serve(ScriptedReplicas([STUCK]), msgspec.structs.replace(REQUEST, timeout=0.01))
    assert output.finish_reason is FinishReason.TIMEOUT


def test_a_request_that_no_replica_takes_is_sent_again_and_not_counted_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_UNTAKEN_SECONDS", 0.001)
    replicas = ScriptedReplicas(*[[FROZEN]] * 15, [END])
    assert _serve(replicas)[-1].finish_reason is FinishReason.LENGTH
    assert len(replicas.calls) == 16
    assert all(call.is_cancelled for call in replicas.calls[:15])


def test_an_aborted_request_ends_and_its_call_is_cancelled() -> None:
    replicas = ScriptedReplicas([EngineCoreOutput("", [4]), STUCK])
    with _connected(replicas) as made:
        made.post(encode(REQUEST))
        _receive(made, lambda _message: True)
        made.post(encode(Abort(["7", "8"])))
        (ended,) = _receive(made, lambda _message: True)
        made.post(encode(Ping()))
        assert _receive(made, lambda _message: True) == [Pong()]
    assert isinstance(ended, EngineCoreOutputs)
    assert [(each.request_id, each.finish_reason) for each in ended.outputs] == [("7", FinishReason.ABORT)]
    assert replicas.calls[0].is_cancelled


def test_times_are_of_the_clock_here() -> None:
    """The replica's machine was started a million seconds before this one."""
    event = EngineCoreEvent(EventType.FIRST_TOKEN, 1e6)
    (output,) = _serve(ScriptedReplicas([msgspec.structs.replace(END, events=[event])], clock=1e6))
    here = asyncio.new_event_loop()
    assert abs(output.events[0].timestamp - here.time()) < PATIENCE
    here.close()


@pytest.mark.parametrize(
    ("method", "results", "expected"),
    [
        ("stats", [{"step": 1, "totals": {"a": [1, 2], "bounds": [5]}}] * 2, STATS_OF_TWO),
        ("snapshot", [[1, 2]], [1, 2]),
    ],
)
def test_the_results_of_replicas_become_one(method: str, results: Sequence[object], expected: object) -> None:
    encoded: list[bytes | Exception] = [*map(msgspec.msgpack.encode, results), RuntimeError("one that died")]
    with _connected(ScriptedReplicas(results=encoded)) as made:
        made.post(encode(UtilityCall(1, method)))
        assert _receive(made, lambda _message: True) == [UtilityResult(1, expected)]


def test_all_replicas_reset_their_caches_or_the_caller_is_told() -> None:
    done = msgspec.msgpack.encode(True)
    cases: list[tuple[list[bytes | Exception], str | None]] = [
        ([done, done], None), ([done, RuntimeError("one that died")], "1 of 2"), ([], "no replica"),
    ]  # fmt: skip
    for results, words in cases:
        with _connected(ScriptedReplicas(results=results)) as made:
            made.post(encode(UtilityCall(1, "reset_cache")))
            (answer,) = _receive(made, lambda _message: True)
        assert isinstance(answer, UtilityResult)
        assert answer.result is (True if words is None else None)
        assert (words or "") in (answer.error or "")


def test_engines_are_not_added_or_removed_where_ray_decides() -> None:
    llm = ReplicatedLLM.__new__(ReplicatedLLM)
    for change in (llm.add_engine("ipc:///run/e.sock"), llm.drain_engine(0), llm.remove_engine(0)):
        with pytest.raises(ValueError, match="Ray decides"):
            asyncio.run(change)


@pytest.mark.parametrize(
    ("method", "num_results", "words"),
    [("stats", 0, "no replica"), ("snapshot", 2, "2 replicas"), ("reload", 1, "deploy the application")],
)
def test_a_call_that_is_not_for_several_engines_says_so(method: str, num_results: int, words: str) -> None:
    with _connected(ScriptedReplicas(results=[msgspec.msgpack.encode({})] * num_results)) as made:
        made.post(encode(UtilityCall(1, method)))
        (result,) = _receive(made, lambda _message: True)
    assert isinstance(result, UtilityResult)
    assert words in (result.error or "")
