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

Sequences = list[list[tuple[float, int]]]  # of each sequence the times at which tokens arrived, and how many each time


class Worker(ABC):
    """A loaded model."""

    @abstractmethod
    def generate(self, prompts: list[list[int]], max_tokens: int) -> Sequences:
        """Generate `max_tokens` tokens for each prompt, greedily."""

    @abstractmethod
    def close(self) -> None:
        """End the engine."""


def sampling(count: int) -> Any:
    """Return greedy parameters for exactly `count` tokens, whose outputs have only what is new."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.DELTA
    return SamplingParams(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, output_kind=kind)


class OfflineWorker(Worker):
    """`vllm.LLM`, whose engine is stepped as its own `generate` does; the times are those at which a step returns."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._engine = LLM(**options).llm_engine

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Sequences:
        """Generate `max_tokens` tokens for each prompt, greedily."""
        sequences: Sequences = [[] for _ in prompts]
        for number, prompt in enumerate(prompts):
            self._engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling(max_tokens))
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if new := len(output.outputs[0].token_ids):
                    sequences[int(output.request_id)].append((time.perf_counter(), new))
        return sequences

    def close(self) -> None:
        """End the engine."""
        self._engine.engine_core.shutdown()


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

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Sequences:
        """Generate `max_tokens` tokens for each prompt, greedily."""
        return self._loop.run_until_complete(self._generate(prompts, max_tokens))

    async def _generate(self, prompts: list[list[int]], max_tokens: int) -> Sequences:
        return list(await asyncio.gather(*(self._stream(prompt, max_tokens) for prompt in prompts)))

    async def _stream(self, prompt: list[int], max_tokens: int) -> list[tuple[float, int]]:
        self._count += 1
        outputs = self._llm.generate({"prompt_token_ids": prompt}, sampling(max_tokens), str(self._count))
        return [(time.perf_counter(), new) async for output in outputs if (new := len(output.outputs[0].token_ids))]

    def close(self) -> None:
        """End the engine."""
        self._llm.shutdown()


def build() -> dict[str, str]:
    """Return the version and commit of vLLM, and the torch and instruction set that it runs on."""
    import torch
    import vllm

    version = vllm.__version__
    scm = getattr(sys.modules.get("vllm._version"), "__commit_id__", None)
    local = version.rpartition("+g")[2].split(".")[0] if "+g" in version else None
    flags = f"torch {torch.__version__}, CPU capability {torch.backends.cpu.get_cpu_capability()}"
    return {"version": version, "commit": str(scm or local or "unknown").removeprefix("g"), "flags": flags}


def serve(answers: TextIO) -> None:
    """Answer each line of standard input until it ends."""
    setup = json.loads(sys.stdin.readline())
    worker: Worker = (StreamingWorker if setup["streaming"] else OfflineWorker)(setup["options"])
    print(json.dumps(build()), file=answers, flush=True)
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
