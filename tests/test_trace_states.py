"""Traces of random request states and slow readers are valid and add up."""

from __future__ import annotations

import itertools
from unittest.mock import patch

from chrome_traces import write
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_executor import Engine

from quire.engine_core.transport.outbox import TraceQueue
from quire.protocol.messages import Abort, StepTrace, UtilityCall

WATCHER = b"watcher"

Action = tuple[str, int]

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("read"), st.integers(1, 9)),
    ),
    max_size=60,
)


class Watched(Engine):
    """An engine with a client that traces it, and a clock that advances each time it is read."""

    def __init__(self) -> None:
        super().__init__(num_pages=12, max_num_batched_tokens=16)
        ticks = itertools.count(1)
        self.read_clock = lambda: next(ticks) / 7
        self.core.clock = self.core.scheduler._clock = self.read_clock
        self.expect_no_output()
        self.names: list[str] = []
        self.queue = TraceQueue()
        self.taken: list[StepTrace] = []
        self.dropped = 0
        self.call("trace_start")

    def call(self, method: str) -> None:
        self.core.receive(WATCHER, UtilityCall(1, method))
        self.put()

    def put(self) -> None:
        """Move sent messages to the reader's queue."""
        for message in self.sent.pop(WATCHER, []):
            if isinstance(message, StepTrace):
                self.dropped += self.queue.put(message)

    def act(self, action: str, value: int) -> None:
        if action == "add":
            self.names.append(str(len(self.names)))
            self.add(self.names[-1], [value % 3] * value, max_tokens=1 + value % 11)
        elif action == "abort":
            self.core.receive(b"client", Abort(self.names[value : value + 1]))
        elif action == "step":
            for _ in range(value):
                self.step()
                self.put()
        else:
            self.read(value)

    def read(self, count: int) -> None:
        for _ in range(count):
            if self.queue:
                self.taken.append(self.queue.take())

    def stop_watching(self) -> None:
        self.finish()
        self.put()
        self.call("trace_stop")
        while self.queue:
            self.read(1)


@settings(max_examples=150)
@given(ACTIONS)
def test_every_token_and_every_end_is_traced(actions: list[Action]) -> None:
    engine = Watched()
    for action in actions:
        engine.act(*action)
    engine.stop_watching()
    written = write(engine.taken)
    assert written.total("tokens", "prefill", "decode") == sum(
        count for step in engine.executor.steps for _, count in step.values()
    )
    assert written.total("cached_tokens", "step") == sum(
        max(output.num_cached_tokens for output in engine.outputs(name)) for name in engine.names
    )
    shown = [name for slices in written.requests.values() for name in (each["name"] for each in slices)]
    assert shown.count("preempted") == engine.core.stats.preemptions
    for number in range(1, len(engine.names) + 1):
        names = written.names(number)
        assert names[0] == "queued"
        assert names[-1].startswith("finished: ")


@settings(max_examples=150)
@given(ACTIONS)
def test_the_trace_of_a_slow_reader_is_valid(actions: list[Action]) -> None:
    with patch("quire.engine_core.transport.outbox._MAX_TRACE_VALUES", 200):
        engine = Watched()
        for action in actions:
            engine.act(*action)
        engine.stop_watching()
    written = write(engine.taken)
    assert sum(trace.dropped for trace in engine.taken) == engine.dropped
    assert engine.taken[-1].last
    marks = [each["name"] for each in written.events if each["name"].endswith(" traces lost")]
    assert marks == [f"{trace.dropped} traces lost" for trace in engine.taken if trace.dropped]
