"""Connections of a server without API keys take turns at its engine."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from engine_watch import EngineWatch
from http_server import Server, events_of
from raw_http import RawConnection, post

from quire.protocol.messages import EventType, StepTrace

COMPLETIONS = "/v1/completions"
LONG: Any = {"max_tokens": 1500, "ignore_eos": True}
NUM_PROMPTS = 64


def has_next(step: StepTrace) -> bool:
    """Return whether a step computes the request that follows the prompts of the list."""
    return any(sequence.number == NUM_PROMPTS + 1 for sequence in step.sequences)


def test_a_list_of_prompts_lets_the_stream_of_another_connection_begin_at_once() -> None:
    with Server.start("--max-num-seqs", "8") as server, ExitStack() as stack:
        flood, other = (stack.enter_context(RawConnection(server.url)) for _ in range(2))
        flood.send(post(COMPLETIONS, {**LONG, "prompt": [[first, 2, 3] for first in range(1, NUM_PROMPTS + 1)]}))
        with EngineWatch(server, idle=False) as watch:
            watch.wait_for(running=8, waiting=NUM_PROMPTS - 8)
            other.send(post(COMPLETIONS, {"prompt": "Once", "max_tokens": 4, "ignore_eos": True, "stream": True}))
            steps = watch.until(has_next)
        events = [event for step in steps for event in step.events]
        assert not [event for event in events if event.type is EventType.FINISHED]
        assert [event for event in events if event.type is EventType.PREEMPTED]  # one of the eight has given way
        *_, last, done = events_of(other.begin_reply().read())
        assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        flood.close()
