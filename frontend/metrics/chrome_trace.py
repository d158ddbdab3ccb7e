"""Chrome traces of an engine's steps, for ui.perfetto.dev and chrome://tracing.

The format is the JSON array of the Trace Event Format: complete slices ("X"), counters ("C"), instants ("i") and names
("M"). Its closing bracket is optional, so that the file of a recording that was killed can be read too.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec

from quire.protocol.messages import EventType, RequestEvent, SchedulerStats, SequenceTrace, StepTrace

# Process ids, which group tracks, and a thread id; the thread id of a request is its number. Viewers show the thread
# whose id equals its process's first: the first request.
_REQUESTS = 1
_ENGINE = 2
_STEPS = 2


@dataclass(slots=True)
class _Track:
    """The track of a request, with its open slice, if any."""

    request_id: str
    open: str = ""
    begin: float = 0.0
    end: float = 0.0  # end of an open decode slice so far
    num_tokens: int = 0
    num_cached_tokens: int = 0  # cached tokens when it was scheduled, for the arguments of its next slice


class ChromeTrace:
    """Writer of step traces to `file` as they arrive; times are those of the engine's clock.

    A request's track has the slices queued, prefill (one for each chunk), decode (one for each uninterrupted stretch)
    and preempted. `num_steps`, `num_requests` and `num_dropped` count steps, requests and lost traces; `is_complete`
    is True once everything is in the file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.num_steps = 0
        self.num_requests = 0
        self.num_dropped = 0
        self.is_complete = False
        self._file = file
        self._tracks: dict[int, _Track] = {}
        self._now = 0.0  # the latest known time
        self._file.write(b"[\n")
        self._name(_ENGINE, "process_name", "engine", 0)
        self._name(_ENGINE, "thread_name", "steps", _STEPS)
        self._name(_REQUESTS, "process_name", "requests", 0)
        self._sort(_REQUESTS, "process_sort_index", 1)

    def add(self, trace: StepTrace) -> None:
        """Write one trace. Raises OSError if the file cannot be written."""
        if trace.dropped:
            self._lose(trace)
        self._now = max(self._now, trace.begin)
        for event in trace.events:
            if event.type is not EventType.FINISHED:
                self._change(event)
        if trace.stats is not None:
            self._step(trace.begin, trace.stats, trace.sequences)
        for event in trace.events:
            if event.type is EventType.FINISHED:
                self._finish(event)

    def close(self) -> None:
        """End the open slices and the array. The file stays open. Raises OSError if it cannot be written."""
        for number in list(self._tracks):
            self._close(number, self._now)
        self._sort(_ENGINE, "process_sort_index", 0, end=b"\n]\n")
        self._file.flush()
        self.is_complete = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, OSError):  # the file cannot be written
            self.close()

    # Steps

    def _step(self, begin: float, stats: SchedulerStats, sequences: list[SequenceTrace]) -> None:
        executing = begin + stats.schedule_seconds
        updating = executing + stats.execute_seconds
        end = updating + stats.update_seconds
        self.num_steps += 1
        self._now = max(self._now, end)
        arguments = {
            "step": stats.step,
            "running": stats.running,
            "waiting": stats.waiting,
            "prefill_tokens": stats.prefill_tokens,
            "decode_tokens": stats.decode_tokens,
            "cached_tokens": stats.cached_tokens,
            "draft_tokens": stats.draft_tokens,
            "accepted_tokens": stats.accepted_tokens,
        }
        self._slice(_ENGINE, _STEPS, "step", begin, end, arguments)
        self._slice(_ENGINE, _STEPS, "schedule", begin, executing)
        self._slice(_ENGINE, _STEPS, "execute", executing, updating)
        self._slice(_ENGINE, _STEPS, "update", updating, end)
        self._count(begin, end, stats)
        for index, sequence in enumerate(sequences):
            if index < stats.decode_tokens:
                self._decode(sequence, executing, updating)
            else:
                self._prefill(sequence, stats.step, executing, updating)

    def _count(self, begin: float, end: float, stats: SchedulerStats) -> None:
        pages = {"free": stats.pages_free, "cached": stats.pages_cached, "held": stats.pages_held}
        self._counter("pages", end, pages)
        self._counter("requests", end, {"running": stats.running, "waiting": stats.waiting})
        self._counter("tokens per step", begin, {"prefill": stats.prefill_tokens, "decode": stats.decode_tokens})
        if not stats.running:
            self._counter("tokens per step", end, {"prefill": 0, "decode": 0})

    def _lose(self, trace: StepTrace) -> None:
        """Close all slices: the traces before this one are lost, so the state of requests is unknown."""
        for number in list(self._tracks):
            self._close(number, self._now)
        self.num_dropped += trace.dropped
        self._instant(_ENGINE, _STEPS, f"{trace.dropped} traces lost", trace.begin)

    # Requests

    def _change(self, event: RequestEvent) -> None:
        """Record that a request was queued, scheduled or preempted; QUEUED is repeated to a new subscription."""
        self._now = max(self._now, event.timestamp)
        name = {EventType.QUEUED: "queued", EventType.PREEMPTED: "preempted"}.get(event.type, "")
        track = self._track(event.number, event.request_id)
        if name and track.open == name:
            return
        self._close(event.number, event.timestamp)
        track.open, track.begin, track.num_cached_tokens = name, event.timestamp, event.num_cached_tokens
        track.num_tokens = event.num_prompt_tokens

    def _prefill(self, sequence: SequenceTrace, step: int, begin: float, end: float) -> None:
        track = self._track(sequence.number, sequence.request_id)
        self._close(sequence.number, begin)
        arguments = {"tokens": sequence.count, "start": sequence.start, "step": step, **_take_cached(track)}
        self._slice(_REQUESTS, sequence.number, "prefill", begin, end, arguments)

    def _decode(self, sequence: SequenceTrace, begin: float, end: float) -> None:
        track = self._track(sequence.number, sequence.request_id)
        if track.open != "decode":
            self._close(sequence.number, begin)
            track.open, track.begin, track.num_tokens = "decode", begin, 0
        track.num_tokens += 1 + sequence.num_accepted
        track.end = end

    def _finish(self, event: RequestEvent) -> None:
        self._now = max(self._now, event.timestamp)
        self._track(event.number, event.request_id)
        self._close(event.number, event.timestamp)
        self._instant(_REQUESTS, event.number, f"finished: {event.finish_reason!s}", event.timestamp)
        del self._tracks[event.number]

    def _close(self, number: int, time: float) -> None:
        """Write the open slice of a request, which ends at `time` unless it is a decode."""
        track = self._tracks[number]
        if track.open == "decode":
            arguments = {"tokens": track.num_tokens, **_take_cached(track)}
            self._slice(_REQUESTS, number, "decode", track.begin, track.end, arguments)
        elif track.open:
            self._slice(_REQUESTS, number, track.open, track.begin, time, {"prompt_tokens": track.num_tokens})
        track.open = ""

    def _track(self, number: int, request_id: str) -> _Track:
        track = self._tracks.get(number)
        if track is None:
            track = self._tracks[number] = _Track(request_id)
            self.num_requests += 1
            self._name(_REQUESTS, "thread_name", f"request {number} (id {request_id})", number)
            self._sort(_REQUESTS, "thread_sort_index", number, track=number)
        return track

    # The format

    def _slice(
        self, process: int, track: int, name: str, begin: float, end: float, arguments: dict[str, int] | None = None
    ) -> None:
        """Write a slice; both ends are rounded before subtraction, so that adjacent slices do not overlap."""
        start, stop = _nanoseconds(begin), _nanoseconds(end)
        event = {"ph": "X", "pid": process, "tid": track, "name": name, "ts": start / 1000}
        self._write({**event, "dur": max(0, stop - start) / 1000, "args": arguments or {}})

    def _counter(self, name: str, time: float, values: dict[str, int]) -> None:
        self._write({"ph": "C", "pid": _ENGINE, "name": name, "ts": _nanoseconds(time) / 1000, "args": values})

    def _instant(self, process: int, track: int, name: str, time: float) -> None:
        event = {"ph": "i", "pid": process, "tid": track, "name": name, "ts": _nanoseconds(time) / 1000, "s": "t"}
        self._write(event)

    def _name(self, process: int, what: str, name: str, track: int) -> None:
        self._write({"ph": "M", "pid": process, "tid": track, "name": what, "args": {"name": name}})

    def _sort(self, process: int, what: str, place: int, *, track: int = 0, end: bytes = b",\n") -> None:
        event = {"ph": "M", "pid": process, "tid": track, "name": what, "args": {"sort_index": place}}
        self._write(event, end)

    def _write(self, event: dict[str, Any], end: bytes = b",\n") -> None:
        self._file.write(msgspec.json.encode(event) + end)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _take_cached(track: _Track) -> dict[str, int]:
    """Return the argument `cached_tokens` of the first slice after a request was scheduled."""
    cached, track.num_cached_tokens = track.num_cached_tokens, 0
    return {"cached_tokens": cached} if cached else {}
