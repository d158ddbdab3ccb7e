"""Quire as users run it: `LLM` or `AsyncLLM`, and an engine process behind a socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from bench.builds import Build, python_call, quire_build
from bench.engines import BenchEngine, StepBytes, checked
from bench.work import Arrivals, BatchTiming, Decode

from quire.frontend import LLM, AsyncLLM, SamplingParams
from quire.frontend.client.observer import OpenRequest
from quire.frontend.client.request_table import RequestTable
from quire.frontend.client.routing import Session
from quire.kernels.gguf.folder import model_folder
from quire.kernels.options import LoadOptions
from quire.kernels.plan import ModelPlan
from quire.kernels.runner import describe
from quire.kernels.work import Chunk, Step, work_of
from quire.protocol.messages import ClientMessage, EngineCoreOutputs
from quire.protocol.speculative_config import parse_speculative_config


@dataclass(frozen=True)
class Configuration:
    """Configuration with which Quire runs a model."""

    model: str
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    speculative_config: str | None = None
    device: str = "cpu"

    @property
    def on_gpu(self) -> bool:
        """True if a GPU computes the model."""
        return self.device != "cpu"

    @property
    def name(self) -> str:
        """Quire, its device if that is a GPU, the names of its quantizations, and how it drafts."""
        words = [
            self.device if self.on_gpu else None,
            self.quantization,
            None if self.kv_cache_dtype == "auto" else f"kv-{self.kv_cache_dtype}",
        ]
        return " ".join(["Quire", *filter(None, words), *self._drafting])

    @property
    def _drafting(self) -> list[str]:
        if self.speculative_config is None:
            return []
        config = parse_speculative_config(self.speculative_config)
        synthetic = config.synthetic_acceptance_length
        return [config.method, *([f"k={config.max_drafts}", f"accepts {synthetic:g}"] if synthetic else [])]

    def plan(self) -> ModelPlan:
        """Return the plan that the engine makes. Raises `ValueError`."""
        folder = model_folder(Path(self.model)) if self.model.endswith(".gguf") else self.model
        options = LoadOptions(
            str(folder), self.dtype, quantization=self.quantization, kv_cache_dtype=self.kv_cache_dtype
        )
        return describe(options)[0]

    def build(self, call: str, max_model_len: int, threads: int) -> Build:
        """Return the build of Quire that is called with these options."""
        return quire_build(python_call(call, {"model": self.model, **self.options(max_model_len, threads)}), threads)

    def options(self, max_model_len: int, threads: int) -> dict[str, Any]:
        """Return the arguments of `LLM`, without those at their defaults."""
        given: dict[str, Any] = {
            "dtype": self.dtype,
            "max_model_len": max_model_len,
            "threads": threads,
            "enable_prefix_caching": False,
        }
        if self.quantization is not None:
            given["quantization"] = self.quantization
        if self.kv_cache_dtype != "auto":
            given["kv_cache_dtype"] = self.kv_cache_dtype
        if self.on_gpu:
            given["device"] = self.device
        if self.speculative_config is not None:
            given["speculative_config"] = self.speculative_config
        return given


def step_bytes(plan: ModelPlan) -> StepBytes:
    """Return a function for the bytes that a step of the plan has to read."""

    def count(work: Decode) -> int:
        step = Step(tuple(Chunk(round(work.mean_context) - 1, 1) for _ in range(work.batch)), work.batch)
        return sum(work_of(plan, launch, step).memory for launch in plan.launches)

    return count


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


class _TimedTable(RequestTable):
    """A request table that notes when the tokens of each request were sampled, on the engine's clock.

    Increments that arrive faster than they are read are merged, and then have the time of their last step.
    """

    def __init__(self, send: Callable[[ClientMessage, Session], None], eos_token_ids: list[int]) -> None:
        super().__init__(send, eos_token_ids)
        self.arrivals: dict[str, list[tuple[float, int]]] = {}  # by ids in the order of submission

    def update(self, message: EngineCoreOutputs) -> list[OpenRequest]:
        for output in message.outputs:
            if output.new_token_ids:
                arrival = message.timestamp, len(output.new_token_ids)
                self.arrivals.setdefault(output.request_id, []).append(arrival)
        return super().update(message)


class _TimedLLM(LLM):
    """`LLM` that notes when tokens were sampled."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model, **options)
        self._table = self.table = _TimedTable(self._engine.engines.send, self._engine.eos_token_ids)


class QuireEngine(BenchEngine):
    """`LLM`; the times of tokens are the engine's."""

    def __init__(self, configuration: Configuration, max_model_len: int, threads: int) -> None:
        super().__init__(
            configuration.name, "", step_bytes(configuration.plan()), ours=True, on_gpu=configuration.on_gpu
        )
        self._build = configuration.build("LLM", max_model_len, threads)
        self._llm = _TimedLLM(configuration.model, **configuration.options(max_model_len, threads))

    @property
    def build(self) -> Build:
        """Build of Quire."""
        return self._build

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> BatchTiming:
        """Generate exactly `max_tokens` tokens for each prompt, greedily."""
        self._llm.table.arrivals.clear()
        begun = time.perf_counter()
        self._llm.generate([list(prompt) for prompt in prompts], _params(max_tokens), use_tqdm=False)
        seconds = time.perf_counter() - begun
        return BatchTiming(seconds, checked("Quire", self._llm.table.arrivals.values(), len(prompts), max_tokens))

    def close(self) -> None:
        """End the engine process."""
        self._llm.close()


class AsyncQuireEngine(BenchEngine):
    """`AsyncLLM` on uvloop; the times of tokens are the caller's."""

    def __init__(self, configuration: Configuration, max_model_len: int, threads: int) -> None:
        super().__init__(
            configuration.name, "", step_bytes(configuration.plan()), ours=True, on_gpu=configuration.on_gpu
        )
        self._build = configuration.build("AsyncLLM", max_model_len, threads)
        self._llm = AsyncLLM(configuration.model, **configuration.options(max_model_len, threads))
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    @property
    def build(self) -> Build:
        """Build of Quire."""
        return self._build

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> BatchTiming:
        """Generate exactly `max_tokens` tokens for each prompt, greedily."""
        return self._runner.run(self._generate(prompts, max_tokens))

    async def _generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> BatchTiming:
        begun = time.perf_counter()
        streams = await asyncio.gather(*(self._stream(prompt, max_tokens) for prompt in prompts))
        return BatchTiming(time.perf_counter() - begun, checked("Quire", streams, len(prompts), max_tokens))

    async def _stream(self, prompt: Sequence[int], max_tokens: int) -> Arrivals:
        return [
            (time.perf_counter(), len(output.outputs[0].token_ids))
            async for output in self._llm.generate(list(prompt), _params(max_tokens), output_kind="delta")
            if output.outputs[0].token_ids
        ]

    def close(self) -> None:
        """End the engine process."""
        self._llm.close()
        self._runner.close()
