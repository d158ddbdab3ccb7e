"""vLLM on the CPU, in a worker process with its own interpreter."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes.util import find_library
from pathlib import Path
from typing import Any

from bench.builds import Build, changed_variables, environment_words, python_call
from bench.engines import BenchEngine, BenchError, StepBytes, checked
from bench.process import PeerProcess
from bench.work import STEP_TOKENS, BatchTiming

WORKER = Path(__file__).with_name("vllm_worker.py")


def vllm_environment(venv: Path, threads: int) -> dict[str, str]:
    """Return the environment that vLLM recommends for CPUs; variables that are already set stay."""
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    if len(cpus) < threads:
        raise BenchError(f"--threads {threads}: vLLM pins each to a CPU of its own, and this process has {len(cpus)}")
    allocator, openmp = find_library("tcmalloc_minimal"), venv / "lib" / "libiomp5.so"
    preload = [name for name in (allocator, str(openmp) if openmp.exists() else None) if name]
    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(preload),
        "PYTHONSAFEPATH": "1",
    }
    path = f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**wanted, **os.environ, "PATH": path}


class VllmPeer(BenchEngine):
    """vLLM's `LLM`, or its `AsyncLLM` if `streaming`.

    The worker reads one JSON line of options, then for each line of prompts and token counts writes one of times.
    """

    def __init__(
        self, venv: Path, *, model: str, dtype: str, max_model_len: int, threads: int, read: StepBytes, streaming: bool,
        speculative_config: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        words = ["vLLM"] if speculative_config is None else ["vLLM", speculative_config.get("method", "")]
        super().__init__(" ".join(words), "", read)
        python = venv / "bin" / "python"
        if not python.exists():
            raise BenchError(f"--vllm {venv}: no {python}; give the folder of a virtual environment with vLLM")
        options = {
            "model": str(Path(model).absolute()),
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_batched_tokens": STEP_TOKENS,
            "max_num_seqs": 256,
            "enable_prefix_caching": False,
            "seed": 0,
            **({} if speculative_config is None else {"speculative_config": speculative_config}),
        }
        environment = vllm_environment(venv, threads)
        self._process = PeerProcess("vLLM", [str(python), str(WORKER)], environment, talks=True)
        try:
            ready = self._ask({"options": options, "streaming": streaming}, "starting")
        except BaseException:
            self._process.close()
            raise
        variables = environment_words(environment, changed_variables(environment))
        command = f"{variables} {python_call('AsyncLLM' if streaming else 'LLM', options)}"
        self._build = Build("vLLM", ready["version"], ready["commit"], ready["flags"], threads, (command,))

    @property
    def build(self) -> Build:
        """Build of vLLM and torch in its environment."""
        return self._build

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> BatchTiming:
        """Generate exactly `max_tokens` tokens for each prompt, greedily."""
        answer = self._ask({"prompts": prompts, "max_tokens": max_tokens}, "generating")
        return BatchTiming(answer["seconds"], checked("vLLM", answer["sequences"], len(prompts), max_tokens))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let the engine run; between its turns it uses no CPU."""
        with self._process.running():
            yield

    def close(self) -> None:
        """End the engine, leaving no process behind. Idempotent."""
        self._process.close()

    def _ask(self, question: dict[str, Any], doing: str) -> Any:
        line = self._process.ask(json.dumps(question).encode())
        if not line:
            raise self._process.death(doing)
        return json.loads(line)
