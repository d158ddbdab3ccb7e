"""Requests of a client that has several engines: the table, against engines that come and go."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mortal_engine import LENGTH, MortalEngine, tokens

from quire.frontend.client.engine_client import Delivery, EngineAway, EngineBack, EngineLeft
from quire.frontend.client.observer import OpenRequest, RequestOptions
from quire.frontend.client.request import GenerationRequest
from quire.frontend.client.request_table import RequestTable
from quire.frontend.client.routing import Routing, Session
from quire.frontend.client.streams import DeliveryInbox, apply_delivery
from quire.frontend.sampling import SamplingParams, engine_params
from quire.frontend.text.prompts import Prompt
from quire.protocol.messages import (
    ClientMessage,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorKind,
    FinishReason,
)
from quire.protocol.routing.routers import LeastLoaded


class Several:
    """A table, and engines by number, of which some are there."""

    def __init__(self, count: int = 3) -> None:
        self.now = 0.0
        self.routing = Routing(LeastLoaded())
        self.engines = {number: MortalEngine(Session(number, 1)) for number in range(count)}
        self.there = set(self.engines)
        self.table = RequestTable(self.send, [], clock=lambda: self.now, routing=self.routing)
        for engine in self.engines.values():
            self.take(EngineBack(engine.session))

    def send(self, message: ClientMessage, session: Session) -> None:
        if session.engine in self.engines:
            self.engines[session.engine].send(message, session)

    def take(self, delivery: Delivery) -> None:
        apply_delivery(self.table, delivery)

    def submit(self, name: str, n: int = 1, prompt_tokens: int = 1) -> GenerationRequest:
        params = SamplingParams(max_tokens=LENGTH, n=n)
        request = GenerationRequest(
            name, Prompt([1] * prompt_tokens, None), params, engine_params(params, prompt_tokens, None), None,
            arrival_time=self.now, options=RequestOptions(),
        )  # fmt: skip
        self.table.submit(request)
        return request

    def step(self, number: int) -> None:
        self.table.update(self.engines[number].step())

    def lose(self, number: int) -> None:
        """Kill an engine; its client tells of it more than once."""
        self.there.discard(number)
        self.engines[number].die()
        self.take(EngineAway("it died", number))
        self.take(EngineAway("it died", number))

    def come_back(self, number: int) -> None:
        self.there.add(number)
        self.take(EngineBack(self.engines[number].return_()))

    def run(self) -> None:
        while self.table.is_resending:
            self.table.resend()
        for _ in range(LENGTH + 2):
            for number in self.there:
                self.step(number)
        assert not self.table


def engine_of(request: GenerationRequest) -> int:
    """Return the engine that a request was sent to last."""
    assert request.metrics.engine is not None
    return request.metrics.engine


class EnginesThatComeAndGo(RuleBasedStateMachine):
    """Each answer has the tokens that it would have had; each is in one engine, which is there."""

    def __init__(self) -> None:
        super().__init__()
        self.world = Several()
        self.requests: list[tuple[GenerationRequest, int]] = []

    @rule(n=st.integers(1, 3))
    def submit(self, n: int) -> None:
        self.requests.append((self.world.submit(str(len(self.requests)), n), n))

    @rule(number=st.integers(0, 5))
    def step(self, number: int) -> None:
        if number in self.world.there:
            self.world.step(number)

    @rule(number=st.integers(0, 5))
    def lose(self, number: int) -> None:
        if number in self.world.there:
            self.world.lose(number)

    @rule(number=st.integers(0, 5), parts=st.integers(0, 5))
    def lose_while_much_is_sent_again(self, number: int, parts: int) -> None:
        """Something else happens before all of it has been sent."""
        if number in self.world.there:
            self.world.there.discard(number)
            self.world.engines[number].die()
            self.world.table.suspend("it died", number)
            for _ in range(parts):
                self.world.table.resend()

    @rule()
    def resend(self) -> None:
        self.world.table.resend()

    @rule(number=st.integers(0, 5))
    def come_back(self, number: int) -> None:
        if number in self.world.engines and number not in self.world.there:
            self.world.come_back(number)

    @rule(number=st.integers(0, 5))
    def leave(self, number: int) -> None:
        """One that is there or not is removed, unless it is the last."""
        if number in self.world.engines and len(self.world.engines) > 1:
            self.world.take(EngineLeft("it was removed", number))
            assert not self.world.engines.pop(number).running
            self.world.there.discard(number)

    @precondition(lambda self: len(self.world.engines) < 6)
    @rule()
    def join(self) -> None:
        number = max(self.world.engines) + 1
        self.world.engines[number] = MortalEngine(Session(number, 1))
        self.world.there.add(number)
        self.world.take(EngineBack(Session(number, 1)))

    @rule(index=st.integers(0, 50))
    def abort(self, index: int) -> None:
        if index < len(self.requests):
            self.world.table.drop([self.requests.pop(index)[0]])

    @invariant()
    def every_open_completion_is_in_one_engine(self) -> None:
        world = self.world
        running = sum(len(engine.running) for engine in world.engines.values())
        in_engines = sum(
            len(submission.wire_ids) for number in world.there for submission in world.table._submissions_in(number)
        )
        assert running == in_engines
        if not world.table.is_resending:
            assert in_engines == sum(
                self._num_open(request) for request, _ in self.requests
                if any(request in self._requests_in(number) for number in world.there)
            )  # fmt: skip
        loads = world.routing.router.loads
        assert set(loads) == world.there
        for number, load in loads.items():
            assert load.in_flight == sum(len(each.engine_params) for each in self._requests_in(number))
            assert load.prefill_tokens >= 0

    def _requests_in(self, number: int) -> list[OpenRequest]:
        return [each.request for each in self.world.table._submissions_in(number)]

    @staticmethod
    def _num_open(request: GenerationRequest) -> int:
        return len([each for each in request.output().outputs if each.finish_reason is None])

    def teardown(self) -> None:
        for number in set(self.world.engines) - self.world.there:
            self.world.come_back(number)
        self.world.run()
        for request, n in self.requests:
            assert tokens(request) == [list(range(LENGTH))] * n


TestEnginesThatComeAndGo = EnginesThatComeAndGo.TestCase
TestEnginesThatComeAndGo.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_what_an_engine_had_goes_on_in_the_others_at_once() -> None:
    world = Several()
    requests = [world.submit(str(number)) for number in range(9)]
    assert [len(engine.running) for engine in world.engines.values()] == [3, 3, 3]
    world.step(0)
    world.lose(0)
    assert sorted(len(world.engines[number].running) for number in (1, 2)) == [4, 5]
    continued = [message for engine in world.engines.values() for message, _ in engine.running.values()]
    assert sum(message.generated_token_ids == [0] for message in continued) == 3
    world.run()
    assert all(tokens(request) == [list(range(LENGTH))] for request in requests)
    routes = [[(hop.engine, hop.left) for hop in request.metrics.route] for request in requests]
    assert [route for route in routes if len(route) == 1] == [[(number, "")] for number in (1, 2)] * 3
    moved = [route for route in routes if len(route) > 1]
    assert [route[0] for route in moved] == [(0, "lost")] * 3
    assert {route[1] for route in moved} == {(1, ""), (2, "")}


def test_a_request_that_kills_gets_no_third_engine() -> None:
    """It waits for the second to come back, which knows what it has died of; others go on elsewhere."""
    world = Several()
    poison = world.submit("poison")
    first = engine_of(poison)
    world.lose(first)
    second = engine_of(poison)
    world.lose(second)
    (third,) = world.there
    assert not world.engines[third].running
    innocent = world.submit("innocent")
    assert engine_of(innocent) == third
    world.come_back(first)
    assert not world.engines[first].running
    world.come_back(second)
    assert len(world.engines[second].running) == 1
    world.run()
    assert tokens(poison) == tokens(innocent) == [list(range(LENGTH))]


def test_a_request_that_gets_on_is_not_suspected() -> None:
    world = Several()
    request = world.submit("a")
    for _ in range(4):
        engine = engine_of(request)
        world.step(engine)
        world.lose(engine)
        assert engine_of(request) != engine
        world.come_back(engine)
    world.run()
    assert tokens(request) == [list(range(LENGTH))]


def test_an_engine_that_gives_way_is_no_loss() -> None:
    world = Several()
    request = world.submit("a")
    for _ in range(4):
        engine = engine_of(request)
        world.engines[engine].die()
        world.take(EngineAway("it gives way", engine, is_loss=False))
        assert engine_of(request) != engine
        world.come_back(engine)
    world.run()
    assert tokens(request) == [list(range(LENGTH))]


def test_what_an_engine_gives_up_as_it_ends_goes_on_elsewhere() -> None:
    world = Several(2)
    request, other = world.submit("a"), world.submit("b")
    ending = engine_of(request)
    (wire_id,) = world.engines[ending].running
    rejected = EngineCoreOutput(
        wire_id, finish_reason=FinishReason.ERROR, error="it ends", error_kind=ErrorKind.SHUTTING_DOWN
    )
    world.take(EngineCoreOutputs([rejected]))
    assert engine_of(request) == engine_of(other) != ending
    assert engine_of(world.submit("c")) != ending  # it gets no more
    world.engines[ending].die()
    world.take(EngineAway("it ended", ending))
    world.come_back(ending)
    assert engine_of(world.submit("d")) == ending
    world.run()
    assert tokens(request) == [list(range(LENGTH))]


def test_the_last_engine_is_used_although_it_drains() -> None:
    world = Several(2)
    world.routing.drain(0)
    assert {engine_of(world.submit(str(number))) for number in range(4)} == {1}
    world.lose(1)
    assert {message.request_id for message, _ in world.engines[0].running.values()}
    world.run()


def test_a_completion_is_sent_with_those_of_its_request() -> None:
    world = Several()
    request = world.submit("a", n=5)
    running = world.engines[engine_of(request)].running
    assert len(running) == 5
    messages: list[EngineCoreRequest] = [message for message, _ in running.values()]
    assert {message.shares_prompt_with for message in messages[1:]} == {messages[0].request_id}
    world.step(engine_of(request))
    world.lose(engine_of(request))
    assert len(world.engines[engine_of(request)].running) == 5
    world.run()


def test_an_engine_that_does_not_come_back_is_not_waited_for_for_ever() -> None:
    world = Several()
    request = world.submit("a")
    for _ in range(2):
        world.lose(engine_of(request))
    (third,) = world.there
    assert not world.engines[third].running
    world.now += 61
    world.take(EngineAway("it died", engine_of(request)))
    assert engine_of(request) == third
    world.run()
    assert tokens(request) == [list(range(LENGTH))]


def test_long_prompts_are_sent_again_one_by_one() -> None:
    """Others on an event loop have their turn between them."""
    world = Several(2)
    requests = [world.submit(str(number), prompt_tokens=20_000) for number in range(8)]
    world.there.discard(0)
    world.engines[0].die()
    world.table.suspend("it died", 0)
    other = world.engines[1].running
    assert len(other) == 4
    for expected in range(5, 9):
        assert world.table.resend() == []
        assert len(other) == expected
    assert not world.table.is_resending
    world.run()
    assert all(tokens(request) == [list(range(LENGTH))] for request in requests)


def test_a_session_that_follows_another_unseen_takes_its_requests() -> None:
    world = Several(2)
    requests = [world.submit(str(number)) for number in range(4)]
    world.engines[1].die()
    world.take(EngineBack(world.engines[1].return_()))  # the news of its end was not needed
    world.run()
    assert all(tokens(request) == [list(range(LENGTH))] for request in requests)


def test_notices_that_engines_are_away_do_not_pile_up() -> None:
    inbox = DeliveryInbox()
    for _ in range(100):
        inbox.put(EngineAway("it died", 0))
        inbox.put(EngineAway("it died", 1))
    inbox.put(EngineBack(Session(0, 2)))
    inbox.put(EngineAway("it died", 0))
    found = []
    while not inbox.empty():
        found.append(inbox.get())
    assert found == [
        EngineAway("it died", 0), EngineAway("it died", 1), EngineBack(Session(0, 2)), EngineAway("it died", 0),
    ]  # fmt: skip
    inbox.put(EngineAway("it died", 1))
    assert not inbox.empty()
