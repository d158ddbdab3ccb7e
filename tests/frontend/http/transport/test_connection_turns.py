"""Connections of a server without API keys take turns at its engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from engine_watch import EngineWatch
from http_server import Server, events_of
from raw_http import RawConnection, post

from quire.protocol.messages import EventType, StepTrace

COMPLETIONS = "/v1/completions"
LONG: Any = {"max_tokens": 1500, "ignore_eos": True}
NUM_PROMPTS = 64
NEXT = NUM_PROMPTS + 1  # the number of the request that follows them


def has(kind: EventType, number: int) -> Callable[[StepTrace], bool]:
    """Return what tells whether a step has such an event of the request with this number, from 1 on."""
    return lambda step: any((event.type, event.number) == (kind, number) for event in step.events)


def test_a_list_of_prompts_lets_the_stream_of_another_connection_begin_at_once() -> None:
    with Server.start("--max-num-seqs", "8") as server, ExitStack() as stack:
        flood, other = (stack.enter_context(RawConnection(server.url)) for _ in range(2))
        with EngineWatch(server) as watch:
            flood.send(post(COMPLETIONS, {**LONG, "prompt": [[first, 2, 3] for first in range(1, NUM_PROMPTS + 1)]}))
            watch.until(has(EventType.QUEUED, NUM_PROMPTS))
            other.send(post(COMPLETIONS, {"prompt": "Once", "max_tokens": 4, "ignore_eos": True, "stream": True}))
            steps = watch.until(has(EventType.SCHEDULED, NEXT))
        events = [(event.type, event.number) for step in steps for event in step.events]
        waited = events[events.index((EventType.QUEUED, NEXT)) : events.index((EventType.SCHEDULED, NEXT))]
        kinds = [kind for kind, _ in waited]
        assert EventType.FINISHED not in kinds
        assert EventType.PREEMPTED in kinds  # one of the eight has given way
        *_, last, done = events_of(other.begin_reply().read())
        assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        flood.close()
