"""An engine whose model answers at once, and clients that keep it busy: what is left is the control plane's time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.cache_shapes import VOCAB_SIZE, Shape

from quire.engine_core.engine import EngineCore, EngineParts
from quire.engine_core.executor import PlainStepResult
from quire.engine_core.features import make_features
from quire.engine_core.planned_executor import PlannedExecutor
from quire.engine_core.request import Request
from quire.kernels.runner import Sequences, StepInput
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import EngineCoreOutputs, EngineCoreRequest, EngineMessage, SamplingParams

CLIENT = b"client"


class TimedExecutor(PlannedExecutor):
    """Executor of answers that are known beforehand, which tells how long it has taken."""

    def __init__(self, sequences: Sequences) -> None:
        super().__init__(sequences, self._next)
        self.texts: dict[str, list[int]] = {}  # prompts and answers, by request
        self.running: Callable[[], Iterable[Request]] = list
        self.seconds = self.cpu_seconds = 0.0  # of the last step
        self._texts: dict[int, list[int]] = {}  # by slot, of the step

    def submit(self, step: StepInput) -> PlainStepResult:
        """Take the step, and its time."""
        began, cpu_began = time.perf_counter(), time.thread_time()
        self._texts = {request.slot: self.texts[request.request_id] for request in self.running()}
        result = super().submit(step)
        self.seconds, self.cpu_seconds = time.perf_counter() - began, time.thread_time() - cpu_began
        return result

    def _next(self, slot: int, end: int) -> int:
        return self._texts[slot][end]


@dataclass
class Pause:
    """Time that one step kept the model waiting, in seconds, without the time of the model itself."""

    wall: float
    cpu: float  # CPU time of this thread
    tokens: int  # tokens that were computed, or found in the prefix cache


class InstantEngine:
    """An EngineCore, and clients of which each sends its next request when the last one has ended."""

    def __init__(
        self, sequences: Sequences, block_size: int, num_pages: int, *, policy: str, max_num_seqs: int
    ) -> None:
        self.executor = TimedExecutor(sequences)
        limits = EngineShape(
            vocab_size=VOCAB_SIZE,
            max_model_len=1 << 17,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=2048,
            block_size=block_size,
            num_pages=num_pages,
            scheduling_policy=policy,
        )
        parts = EngineParts(make_features(self.executor.sequences, limits, self._send))
        self.core = EngineCore(self.executor, limits, self._send, parts)
        self.executor.running = lambda: self.core.scheduler.running
        self.num_ended = 0
        self._clients: dict[str, tuple[Shape, int]] = {}  # by the request that is under way: and its answer's length
        self._ended: list[str] = []

    def add_clients(self, shapes: Sequence[Shape], answer_tokens: int) -> None:
        """Add a client for each shape: its sequences, of which the model generates the last `answer_tokens`."""
        for number, shape in enumerate(shapes):
            self._ask(f"{number}-0", shape, answer_tokens)

    def step(self) -> Pause:
        """Take one step; each client whose request it has ended sends the next one."""
        stats = self.core.scheduler.counters
        cached = stats.cached_tokens
        began, cpu_began = time.perf_counter(), time.thread_time()
        self.core.step()
        wall = time.perf_counter() - began - self.executor.seconds
        cpu = time.thread_time() - cpu_began - self.executor.cpu_seconds
        last = self.core.stats
        tokens = last.prefill_tokens + last.decode_tokens + stats.cached_tokens - cached
        ended, self._ended = self._ended, []
        for request_id in ended:
            shape, answer_tokens = self._clients.pop(request_id)
            del self.executor.texts[request_id]
            client, number = request_id.split("-")
            self._ask(f"{client}-{int(number) + 1}", shape, answer_tokens)
        self.num_ended += len(ended)
        return Pause(wall, cpu, tokens)

    def _ask(self, request_id: str, shape: Shape, answer_tokens: int) -> None:
        text = shape.tokens(shape.extend())
        self._clients[request_id] = shape, answer_tokens
        self.executor.texts[request_id] = text
        params = SamplingParams(max_tokens=answer_tokens, ignore_eos=True)
        self.core.receive(CLIENT, EngineCoreRequest(request_id, text[:-answer_tokens], params))

    def _send(self, client_id: bytes, message: EngineMessage) -> None:
        assert client_id == CLIENT
        assert isinstance(message, EngineCoreOutputs)
        for output in message.outputs:
            assert output.error is None, output.error
            if output.finish_reason is not None:
                self._ended.append(output.request_id)
