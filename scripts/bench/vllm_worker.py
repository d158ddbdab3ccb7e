"""Worker in vLLM's own environment: keeps a model loaded and answers one JSON line with another.

`vllm_peer.py` starts it, and documents the lines. Messages of vLLM go to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from typing import Any, TextIO

Sequences = list[tuple[float, float, int]]  # times of the first and the last token, and the number after the first


class Worker(ABC):
    """A loaded model."""

    @abstractmethod
    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> Sequences:
        """Generate exactly `max_tokens` tokens for each prompt, greedily."""

    @abstractmethod
    def close(self) -> None:
        """End the engine."""


def sampling(count: int, **options: Any) -> Any:
    """Return greedy parameters for exactly `count` tokens."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, **options)


def check_count(count: int, wanted: int) -> None:
    """Raise RuntimeError if there are more or fewer tokens than requested."""
    if count != wanted:
        raise RuntimeError(f"{count} tokens instead of {wanted}")


class OfflineWorker(Worker):
    """`vllm.LLM`; the times are those of its engine core."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**options, disable_log_stats=False)  # without statistics there are no times

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> Sequences:
        """Generate exactly `max_tokens` tokens for each prompt, greedily."""
        params = [sampling(count) for count in max_tokens]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        for output, count in zip(outputs, max_tokens, strict=True):
            check_count(len(output.outputs[0].token_ids), count)
        return [
            (output.metrics.first_token_ts, output.metrics.last_token_ts, count - 1)
            for output, count in zip(outputs, max_tokens, strict=True)
        ]

    def close(self) -> None:
        """End the engine."""
        self._llm.llm_engine.engine_core.shutdown()


class StreamingWorker(Worker):
    """vLLM's `AsyncLLM`; the times are those at which the caller gets an output."""

    def __init__(self, options: dict[str, Any]) -> None:
        import uvloop
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._loop = uvloop.new_event_loop()  # as vLLM's server has it
        self._count = 0
        self._llm = self._loop.run_until_complete(self._start(AsyncLLM, AsyncEngineArgs(**options)))

    @staticmethod
    async def _start(kind: Any, arguments: Any) -> Any:
        return kind.from_engine_args(arguments)

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> Sequences:
        """Generate exactly `max_tokens` tokens for each prompt, greedily."""
        return self._loop.run_until_complete(self._generate(prompts, max_tokens))

    async def _generate(self, prompts: list[list[int]], max_tokens: list[int]) -> Sequences:
        return list(await asyncio.gather(*map(self._stream, prompts, max_tokens)))

    async def _stream(self, prompt: list[int], max_tokens: int) -> tuple[float, float, int]:
        from vllm.sampling_params import RequestOutputKind

        self._count += 1
        params = sampling(max_tokens, output_kind=RequestOutputKind.DELTA)
        first = last = 0.0
        count = later = 0
        async for output in self._llm.generate({"prompt_token_ids": prompt}, params, str(self._count)):
            last = time.perf_counter()
            new = len(output.outputs[0].token_ids)
            if count == 0:
                first = last
            else:
                later += new
            count += new
        check_count(count, max_tokens)
        return first, last, later

    def close(self) -> None:
        """End the engine."""
        self._llm.shutdown()


def serve(answers: TextIO) -> None:
    """Answer each line of standard input until it ends."""
    setup = json.loads(sys.stdin.readline())
    worker: Worker = (StreamingWorker if setup["streaming"] else OfflineWorker)(setup["options"])
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        begun = time.perf_counter()
        sequences = worker.generate(request["prompts"], request["max_tokens"])
        seconds = time.perf_counter() - begun
        print(json.dumps({"seconds": seconds, "sequences": sequences}), file=answers, flush=True)
    worker.close()


def main() -> None:
    """Reserve standard output for answers; redirect vLLM's messages to standard error."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        serve(answers)


if __name__ == "__main__":
    main()
