"""Engines with --fast-matmul: not the CPU's bits, but the same in all batches and chunks, and KV pages of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulated_gpu
import numpy as np
import pytest
import tiny_model
from engine_process import DealerClient, EngineUnderTest
from http_server import Server, folder_of_demo_model
from patience import PATIENCE
from quire_command import quire_command

from quire.frontend import LLM, SamplingParams
from quire.frontend.text.prompts import PromptType
from quire.protocol.messages import Ready

OPTIONS: dict[str, Any] = {
    "num_pages": 64, "threads": 1, "skip_tokenizer_init": True, "start_timeout": PATIENCE, "dtype": "bfloat16",
}  # fmt: skip
FAST: dict[str, Any] = {"device": "cuda", "fast_matmul": True}
PROMPTS: list[PromptType] = [
    [5 + 7 * (3 * number + place) % 120 for place in range(4 + 13 * number)] for number in range(6)
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=3, prompt_logprobs=1),
    SamplingParams(temperature=0.9, top_p=0.8, seed=7, max_tokens=12, ignore_eos=True, logprobs=3),
]


@pytest.fixture(scope="module", autouse=True)
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the engines a GPU."""
    with emulated_gpu.for_processes(tmp_path_factory.mktemp("gpu")):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny", tiny_model.weights())


def answers(llm: LLM, *, together: bool = True) -> list[object]:
    """Return answers to all prompts, in one batch or one after the other."""
    params = [PARAMS[number % len(PARAMS)] for number in range(len(PROMPTS))]
    if together:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    else:
        outputs = [llm.generate([each], one, use_tqdm=False)[0] for each, one in zip(PROMPTS, params, strict=True)]
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs, each.prompt_logprobs) for each in outputs]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[object]:
    """The answers to each prompt alone."""
    with LLM(str(model), enable_prefix_caching=False, **FAST, **OPTIONS) as llm:
        return answers(llm, together=False)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 5, "max_num_seqs": 3},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=str,
)
def test_answers_are_the_same_in_every_batch(model: Path, expected: list[object], options: dict[str, Any]) -> None:
    with LLM(str(model), **FAST, **OPTIONS, **options) as llm:
        assert answers(llm) == expected
        assert answers(llm) == expected
        assert llm.stats()["totals"]["cached_tokens"] > 0


def log_probabilities(model: Path, **options: Any) -> list[float]:
    """Return those of a prompt's tokens."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with LLM(str(model), **OPTIONS, **options) as llm:
        found = llm.generate([PROMPTS[-1]], params, use_tqdm=False)[0].prompt_logprobs
    assert found is not None
    return [entry.logprob for entries in found if entries for entry in entries.values()]


def test_answers_are_near_those_of_the_cpu(model: Path) -> None:
    cpu, fast = log_probabilities(model), log_probabilities(model, **FAST)
    assert np.abs(np.subtract(cpu, fast)).max() < 0.05
    assert cpu != fast


def test_pages_on_disk_are_not_those_of_others(model: Path, tmp_path: Path) -> None:
    prompt = [9 + 5 * place % 120 for place in range(130)]
    params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
    read = []
    for options in ({"device": "cuda"}, FAST, FAST, {"device": "cuda"}):
        with LLM(str(model), kv_disk=str(tmp_path), kv_disk_bytes="64MiB", **options, **OPTIONS) as llm:
            llm.generate([prompt], params, use_tqdm=False)
            read.append(llm.stats()["kv_disk_pages_read"])
    pages = len(prompt) // 32
    assert read == [0, 0, pages, pages]


@pytest.mark.parametrize("is_fast", [False, True])
def test_the_handshake_says_so(model: Path, *, is_fast: bool) -> None:
    flags = ("--fast-matmul",) if is_fast else ()
    with (
        EngineUnderTest(model, "--device", "cuda", "--dtype", "bfloat16", *flags) as engine,
        DealerClient(engine.address) as client,
    ):
        assert client.first(Ready).fast_matmul == is_fast


@pytest.mark.parametrize("is_fast", [False, True])
def test_the_server_and_the_command_line_say_so(*, is_fast: bool) -> None:
    flags = ("--fast-matmul",) if is_fast else ()
    with Server.start(
        str(folder_of_demo_model()), "--device", "cuda", "--num-pages", "16", *flags, environment=dict(os.environ)
    ) as server:
        health = server.request("/health").json()
        assert health == {"status": "ok", "devices": ["cuda:0"]} | ({"fast_matmul": True} if is_fast else {})
        [engine] = server.request("/engines").json()["engines"]
        assert engine["fast_matmul"] == is_fast
        for arguments, words in (
            (["engines", "list", "--url", server.url], "(started by the server, fast matmul)"),
            (["ps"], "cuda:0 (fast matmul)"),
        ):
            done = subprocess.run(quire_command(*arguments), capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            assert (words in done.stdout) == is_fast, done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "cpu"], "fast_matmul multiplies on tensor cores, and device is cpu, which is the CPU here; give"),
        (["--device", "cuda"], "is computed in float32; give the dtype bfloat16, or leave fast_matmul out"),
    ],
    ids=str,
)
def test_what_cannot_be_fast_is_an_error_of_one_line(model: Path, flags: list[str], words: str) -> None:
    command = [sys.executable, "-P", "-m", "quire.engine_core", "--model", str(model), "--fast-matmul", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert words in done.stderr
