"""Requests that outlive their engines: the table, against an engine that dies in all ways."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mortal_engine import LENGTH, MortalEngine, tokens

from quire.frontend.client.engine_client import EngineBack
from quire.frontend.client.observer import RequestOptions
from quire.frontend.client.request import GenerationRequest
from quire.frontend.client.request_table import RequestTable
from quire.frontend.client.streams import apply_delivery
from quire.frontend.errors import EngineDeadError, RequestError
from quire.frontend.sampling import SamplingParams, engine_params
from quire.frontend.text.prompts import Prompt
from quire.protocol.messages import (
    MAX_ABORTED,
    Abort,
    EngineCoreOutput,
    EngineCoreOutputs,
    ErrorKind,
    FinishReason,
)


class Frontend:
    """A table on a `MortalEngine`, with a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.engine = MortalEngine()
        self.table = RequestTable(self.engine.send, [], clock=lambda: self.now)

    def submit(
        self, name: str, *, n: int = 1, timeout: float | None = None, most: int | None = None
    ) -> GenerationRequest:
        params = SamplingParams(max_tokens=LENGTH, n=n)
        request = GenerationRequest(
            name, Prompt([1], None), params, engine_params(params, 1, None), None,
            arrival_time=self.now, options=RequestOptions(timeout=timeout),
        )  # fmt: skip
        self.table.submit(request, most)
        return request

    def step(self) -> None:
        self.table.update(self.engine.step())

    def kill(self) -> None:
        self.engine.die()
        self.table.suspend("it died")
        self.table.suspend("it died")  # is said again and again
        self.return_()

    def return_(self) -> None:
        apply_delivery(self.table, EngineBack(self.engine.return_()))

    def run(self) -> None:
        """Step until all requests have ended."""
        for _ in range(10_000):
            if not self.table:
                return
            self.step()
        pytest.fail(f"{len(self.table)} requests wait for ever")


@given(counts=st.lists(st.integers(1, 3), min_size=1, max_size=8), kills=st.lists(st.integers(4, 8), max_size=6))
def test_an_engine_killed_from_outside_costs_nobody_anything(counts: list[int], kills: list[int]) -> None:
    frontend = Frontend()
    requests = [frontend.submit(str(number), n=n) for number, n in enumerate(counts)]
    for steps in kills:
        for _ in range(steps):
            frontend.step()
        frontend.kill()
        assert len(frontend.engine.running) == sum(
            n for n, each in zip(counts, requests, strict=True) if not each.finished
        )
    frontend.run()
    assert [tokens(request) for request in requests] == [[list(range(LENGTH))] * n for n in counts]


def test_a_request_keeps_its_identity_and_no_other_has_it() -> None:
    frontend = Frontend()
    requests = [frontend.submit(str(number), n=2) for number in range(3)]
    frontend.step()
    frontend.kill()
    first, again = frontend.engine.identities[:6], frontend.engine.identities[6:]
    assert first == again
    assert len({*first, 0}) == 7
    frontend.run()
    assert all(tokens(request) == [list(range(LENGTH))] * 2 for request in requests)


def test_requests_without_an_engine_can_be_submitted_aborted_and_time_out() -> None:
    frontend = Frontend()
    running = frontend.submit("running", timeout=10.0)
    frontend.step()
    frontend.table.suspend("it died")
    waiting, aborted, late = (frontend.submit("a"), frontend.submit("b"), frontend.submit("c", timeout=1.0))
    assert frontend.table.abort(aborted)
    assert aborted.finish_reasons == ["abort"]
    assert not frontend.table.abort(aborted)
    frontend.now = 2.0
    assert frontend.table.suspend("it died") == [late]
    assert late.finish_reasons == ["timeout"]
    frontend.engine.die()
    frontend.return_()
    left = {len(message.generated_token_ids): message.timeout for message, _ in frontend.engine.running.values()}
    assert left == {1: 8.0, 0: None}  # of the ten seconds, two are gone
    frontend.run()
    assert tokens(running) == tokens(waiting) == [list(range(LENGTH))]


def test_what_is_sent_to_an_engine_that_is_gone_is_lost() -> None:
    """The client knows before the table does."""
    frontend = Frontend()
    frontend.engine.die()
    session = frontend.engine.return_()
    request = frontend.submit("a")
    assert not frontend.engine.running
    frontend.table.suspend("it died")
    apply_delivery(frontend.table, EngineBack(session))
    frontend.run()
    assert tokens(request) == [list(range(LENGTH))]


def test_prompt_logprobs_are_asked_for_until_they_have_come() -> None:
    params = SamplingParams(max_tokens=4, prompt_logprobs=1)
    request = GenerationRequest(
        "a", Prompt([1], None), params, [params], None, arrival_time=0.0, options=RequestOptions()
    )
    assert request.continuation(0) == (params, [])
    request.append(0, EngineCoreOutput("0", [5], new_prompt_logprobs=[None]), 1.0)
    assert request.continuation(0) == (msgspec.structs.replace(params, prompt_logprobs=None), [5])


def test_an_abort_that_was_not_answered_is_kept() -> None:
    frontend = Frontend()
    request = frontend.submit("a")
    frontend.step()
    assert not frontend.table.abort(request)
    assert frontend.table.suspend("it died") == [request]
    assert request.finish_reasons == ["abort"]
    assert not frontend.table


def test_a_request_that_the_engine_ends_though_nobody_asked_has_lost_its_answer() -> None:
    frontend = Frontend()
    lost, left, aborted = frontend.submit("lost", n=2), frontend.submit("left"), frontend.submit("aborted")
    frontend.step()
    ids = {completion.submission.request: wire_id for wire_id, completion in frontend.table._open.items()}
    frontend.table.drop([left])
    assert not frontend.table.abort(aborted)
    ends = [EngineCoreOutput(wire_id, [1], finish_reason=FinishReason.ABORT) for wire_id in ids.values()]
    frontend.table.update(EngineCoreOutputs(ends))
    assert isinstance(lost.error, RequestError)
    assert lost.error.kind is ErrorKind.SHUTTING_DOWN
    assert (aborted.error, aborted.finish_reasons) == (None, ["abort"])
    assert not frontend.table


def test_any_number_of_requests_is_aborted() -> None:
    aborts: list[Abort] = []
    table = RequestTable(lambda message, _: aborts.append(message) if isinstance(message, Abort) else None, [])
    params = SamplingParams(max_tokens=LENGTH)
    requests = [
        GenerationRequest(
            str(number), Prompt([1], None), params, engine_params(params, 1, None), None, arrival_time=0.0,
            options=RequestOptions(),
        )
        for number in range(MAX_ABORTED + 1)
    ]  # fmt: skip
    for request in requests:
        table.submit(request)
    table.drop(requests)
    assert [len(abort.request_ids) for abort in aborts] == [MAX_ABORTED, 1]


def test_a_dead_engine_takes_no_request() -> None:
    frontend = Frontend()
    request = frontend.submit("a")
    frontend.table.suspend("it died")
    assert frontend.table.end(EngineDeadError("for good")) == [request]
    with pytest.raises(EngineDeadError, match="for good"):
        frontend.submit("b")


@given(n=st.integers(1, 9), most=st.integers(1, 4), kills=st.sets(st.integers(0, 8)))
def test_a_request_may_be_sent_in_parts(n: int, most: int, kills: set[int]) -> None:
    frontend = Frontend()
    request = frontend.submit("a", n=n, most=most)
    sent = 1
    while frontend.table.send_more(request, most):
        frontend.step()
        if sent in kills:
            frontend.kill()  # all are sent to the next engine
            assert not frontend.table.send_more(request, most)
        sent += 1
    frontend.run()
    assert tokens(request) == [list(range(LENGTH))] * n


def test_the_parts_of_a_request_share_the_prompt_of_those_that_were_sent() -> None:
    frontend = Frontend()
    request = frontend.submit("a", n=5, most=2)
    while frontend.table.send_more(request, 2):
        pass
    messages = [message for message, _ in frontend.engine.running.values()]
    assert [message.shares_prompt_with for message in messages] == [None, *[messages[0].request_id] * 4]


def test_what_was_not_sent_of_an_aborted_request_ends_at_once() -> None:
    frontend = Frontend()
    request = frontend.submit("a", n=3, most=1)
    assert not frontend.table.abort(request)
    assert not frontend.table.send_more(request, 1)
    assert not request.finished  # the first is in the engine, which has to answer
    assert frontend.table.suspend("it died") == [request]
    assert request.finish_reasons == ["abort"] * 3
    assert not frontend.table


def test_without_an_engine_nothing_is_left_to_send() -> None:
    frontend = Frontend()
    frontend.table.suspend("it died")
    request = frontend.submit("a", n=3, most=1)
    assert not frontend.table.send_more(request, 1)
    frontend.return_()
    frontend.run()
    assert tokens(request) == [list(range(LENGTH))] * 3
