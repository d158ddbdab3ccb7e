"""A reader of Chrome traces that checks that they are valid."""

from __future__ import annotations

import io
import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec

from quire.frontend.metrics.chrome_trace import ChromeTrace
from quire.protocol.messages import StepTrace

REQUESTS, ENGINE, STEPS = 1, 2, 2

Event = dict[str, Any]


def begin(event: Event) -> int:
    """Return the start of a slice in nanoseconds."""
    return round(float(event["ts"]) * 1000)


def end(event: Event) -> int:
    """Return the end of a slice in nanoseconds."""
    return begin(event) + round(float(event["dur"]) * 1000)


class WrittenTrace:
    """The events of a file by their tracks, in order of time."""

    def __init__(self, text: bytes) -> None:
        self.events: list[Event] = msgspec.json.decode(text)
        self.slices: dict[tuple[int, int], list[Event]] = defaultdict(list)
        for event in self.events:
            if event["ph"] == "X":
                self.slices[event["pid"], event["tid"]].append(event)
        for slices in self.slices.values():
            slices.sort(key=lambda event: (begin(event), -end(event)))
        self.steps = [event for event in self.slices[ENGINE, STEPS] if event["name"] == "step"]

    @property
    def requests(self) -> dict[int, list[Event]]:
        """The slices of each request."""
        return {track: slices for (process, track), slices in self.slices.items() if process == REQUESTS}

    def names(self, number: int) -> list[str]:
        """Return the names of a request's slices, and how it ended."""
        return [event["name"] for event in self.requests[number]] + self.ends(number)

    def ends(self, number: int) -> list[str]:
        return [event["name"] for event in self.events if event["ph"] == "i" and event["tid"] == number and
                event["pid"] == REQUESTS]  # fmt: skip

    def total(self, argument: str, *names: str) -> int:
        """Return the sum of an argument over the slices with these names."""
        slices = [event for slices in self.slices.values() for event in slices if event["name"] in names]
        return sum(event["args"].get(argument, 0) for event in slices)

    def check(self) -> None:
        """Check that slices of a request do not overlap, phases lie in their step, and tokens add up."""
        for slices in [*self.requests.values(), self.steps]:
            for event, following in itertools.pairwise(slices):
                assert end(event) <= begin(following), (event, following)
        parts = [event for event in self.slices[ENGINE, STEPS] if event["name"] != "step"]
        assert [event["name"] for event in parts] == ["schedule", "execute", "update"] * len(self.steps)
        for index, part in enumerate(parts):
            step = self.steps[index // 3]
            assert begin(step) <= begin(part) <= end(part) <= end(step)
        assert self.total("tokens", "prefill") == self.total("prefill_tokens", "step")
        assert self.total("tokens", "decode") == self.total("decode_tokens", "step")
        for event in self.events:
            if event["ph"] == "C":
                assert min(event["args"].values()) >= 0


def write(traces: Iterable[StepTrace]) -> WrittenTrace:
    """Write a file of these traces, check and return it."""
    file = io.BytesIO()
    with ChromeTrace(file) as chrome:
        for trace in traces:
            chrome.add(trace)
    written = WrittenTrace(file.getvalue())
    written.check()
    return written
