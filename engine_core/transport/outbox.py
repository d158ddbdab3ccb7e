"""The outbox of a client that does not read as fast as the engine writes.

Increments of one request merge while they wait, so the outbox grows with the tokens, not with the steps, and holds one
output a request. `waiting` measures it, so that the server can give up on a client that never reads.
"""

from __future__ import annotations

from collections import deque

import msgspec

from quire.protocol.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineGoodbye,
    EngineMessage,
    ErrorMessage,
    KvPage,
    KvWelcome,
    Pong,
    PrefixReport,
    PrefixTree,
    SchedulerStats,
    StepTrace,
    UtilityResult,
)

_OUTPUT_VALUES = 16  # an output with its lists takes about the memory of 16 numbers
NUMBER_BYTES = 36
_CONTROL_VALUES = 64
_RESULT_VALUES = 2048  # a snapshot of the engine
_RUN_VALUES = 32  # of a prefix tree or a report, without tokens
_MOST_REPLIES: dict[type, int] = {Pong: 1, KvWelcome: 1, ErrorMessage: 16}
_TRACE_VALUES = 32
_MAX_TRACE_VALUES = 1_000_000  # some 1000 steps of 256 requests


class Outbox:
    """The messages that wait for one client: replies in order, then merged outputs, then traces, a farewell last."""

    def __init__(self) -> None:
        self._replies: deque[EngineMessage] = deque()
        self._outputs: dict[str, EngineCoreOutput] = {}
        self._values = 0
        self._reply_values = 0
        self._stats: SchedulerStats | None = None
        self._timestamp = 0.0
        self._traces = TraceQueue()
        self._goodbye: EngineGoodbye | None = None

    def __bool__(self) -> bool:
        return bool(self._replies or self._outputs or self._stats or self._traces or self._goodbye)

    @property
    def waiting(self) -> int:
        """Memory of the waiting messages, in numbers (of a Python list, of NUMBER_BYTES each).

        Traces do not count: they have a limit of their own, beyond which they are dropped.
        """
        return self._values + self._reply_values

    def put(self, message: EngineMessage) -> int:
        """Add a message that is no trace; return how many of its outputs were merged into others.

        The message stays unchanged: its lists are copied before anything is appended to them.
        """
        if isinstance(message, EngineCoreOutputs):
            self._stats = message.stats or self._stats
            self._timestamp = message.timestamp
            return sum([self._put_output(output) for output in message.outputs])
        if isinstance(message, EngineGoodbye):
            self._goodbye = message
        else:
            self._put_reply(message)
        return 0

    def put_trace(self, trace: StepTrace) -> int:
        """Add a trace; return how many older ones were dropped for it."""
        return self._traces.put(trace)

    def take(self, max_values: int) -> EngineMessage | None:
        """Remove and return the next message, outputs up to about `max_values` numbers; None if nothing waits."""
        if self._replies:
            reply = self._replies.popleft()
            self._reply_values -= _weigh_reply(reply)
            return reply
        if self._outputs or self._stats:
            return self._take_outputs(max_values)
        if self._traces:
            return self._traces.take()
        goodbye, self._goodbye = self._goodbye, None
        return goodbye

    def _put_reply(self, message: EngineMessage) -> None:
        """Keep the latest of pongs, welcomes and errors, and all results of calls."""
        if (most := _MOST_REPLIES.get(type(message))) is not None:
            same = [waiting for waiting in self._replies if type(waiting) is type(message)]
            if len(same) >= most:
                self._replies.remove(same[0])
                self._reply_values -= _weigh_reply(same[0])
        self._replies.append(message)
        self._reply_values += _weigh_reply(message)

    def _put_output(self, output: EngineCoreOutput) -> bool:
        """Add an output; return True if it was merged."""
        waiting = self._outputs.get(output.request_id)
        if waiting is None:
            self._outputs[output.request_id] = _copy(output)
            self._values += weigh(output)
        elif waiting.finish_reason is None:  # else the request has ended: a second end must not reach the client
            _merge(waiting, output)
            self._values += weigh(output) - _OUTPUT_VALUES
            return True
        return False

    def _take_outputs(self, max_values: int) -> EngineCoreOutputs:
        taken: list[EngineCoreOutput] = []
        budget = max_values
        for output in self._outputs.values():
            taken.append(output)
            budget -= weigh(output)
            if budget <= 0:
                break
        for output in taken:
            del self._outputs[output.request_id]
        self._values -= max_values - budget
        stats, self._stats = self._stats, None
        return EngineCoreOutputs(taken, stats, self._timestamp)


class TraceQueue:
    """The latest traces: the oldest are dropped first, and counted."""

    def __init__(self) -> None:
        self._traces: deque[StepTrace] = deque()
        self._values = 0
        self._dropped = 0  # since the last one that was taken

    def __bool__(self) -> bool:
        return bool(self._traces)

    def put(self, trace: StepTrace) -> int:
        """Add a trace; return how many others that dropped."""
        self._traces.append(trace)
        self._values += weigh_trace(trace)
        before = self._dropped
        while self._values > _MAX_TRACE_VALUES and len(self._traces) > 1:
            self._values -= weigh_trace(self._traces.popleft())
            self._dropped += 1
        return self._dropped - before

    def take(self) -> StepTrace:
        """Remove and return the oldest, with the number of traces lost before it. IndexError if there is none."""
        trace = self._traces.popleft()  # other clients may get the same one
        self._values -= weigh_trace(trace)
        dropped, self._dropped = self._dropped, 0
        return msgspec.structs.replace(trace, dropped=dropped) if dropped else trace


def _weigh_reply(reply: EngineMessage) -> int:
    if isinstance(reply, KvPage):
        return _CONTROL_VALUES + memoryview(reply.data).nbytes // NUMBER_BYTES
    if isinstance(reply, PrefixReport):
        runs = sum(_RUN_VALUES + len(keys) + len(tokens) for _, keys, tokens in reply.stored)
        salts = sum(_RUN_VALUES + len(salt) // NUMBER_BYTES for _, salt in reply.roots)
        return _CONTROL_VALUES + len(reply.removed) + runs + salts
    if not isinstance(reply, UtilityResult):
        return _CONTROL_VALUES
    if not isinstance(reply.result, PrefixTree):
        return _RESULT_VALUES
    return sum(_RUN_VALUES + len(run.first_token_ids) + len(run.last_token_ids) for run in reply.result.runs)


def weigh_trace(trace: StepTrace) -> int:
    """Return the memory of a trace, in numbers."""
    return _TRACE_VALUES + 4 * len(trace.sequences) + 6 * len(trace.events)


def weigh(output: EngineCoreOutput) -> int:
    """Return the memory of an output, in numbers."""
    values = _OUTPUT_VALUES + len(output.new_token_ids) + 4 * len(output.events)
    for logprobs in (output.new_logprobs, output.new_prompt_logprobs):
        if logprobs is not None:
            values += sum(8 + 2 * len(entry.token_ids) for entry in logprobs if entry is not None)
    if output.pooled is not None:
        values += len(output.pooled) // NUMBER_BYTES
    for beam in output.beams or ():
        values += _OUTPUT_VALUES + sum(9 + 2 * len(entry.token_ids) for entry in beam.logprobs)
    return values


def _copy(output: EngineCoreOutput) -> EngineCoreOutput:
    """Return a copy with lists of its own; the engine may have kept the original's."""
    return msgspec.structs.replace(
        output,
        new_token_ids=list(output.new_token_ids),
        new_logprobs=None if output.new_logprobs is None else list(output.new_logprobs),
        new_prompt_logprobs=None if output.new_prompt_logprobs is None else list(output.new_prompt_logprobs),
        events=list(output.events),
    )


def _merge(waiting: EngineCoreOutput, more: EngineCoreOutput) -> None:
    """Append `more` to `waiting`, which has not ended."""
    waiting.new_token_ids.extend(more.new_token_ids)
    if more.new_logprobs is not None:
        waiting.new_logprobs = waiting.new_logprobs or []
        waiting.new_logprobs.extend(more.new_logprobs)
    if more.new_prompt_logprobs is not None:
        waiting.new_prompt_logprobs = waiting.new_prompt_logprobs or []
        waiting.new_prompt_logprobs.extend(more.new_prompt_logprobs)
    waiting.events.extend(more.events)
    waiting.finish_reason = more.finish_reason
    waiting.stop_reason = more.stop_reason
    waiting.error, waiting.error_kind = more.error, more.error_kind
    waiting.is_whole = more.is_whole
    waiting.num_accepted_drafts, waiting.num_rejected_drafts = more.num_accepted_drafts, more.num_rejected_drafts
    waiting.beams = more.beams
    waiting.pooled = more.pooled
    waiting.num_cached_tokens = max(waiting.num_cached_tokens, more.num_cached_tokens)
