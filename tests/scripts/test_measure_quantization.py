"""`scripts/measure_quantization.py` as a program, on a tiny text."""

from __future__ import annotations

import json
import math
import random
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf
from patience import PATIENCE
from reference_libraries import import_reference

from quire.kernels.step import StepInput

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_quantization.py"
TEXTS = [
    "Once upon a time there was a king who had three sons, and the youngest was called the simpleton.",
    "A fox saw a crow with a piece of cheese in her beak.",
]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)


def measure(folder: Path, *arguments: str | Path) -> tuple[list[str], list[dict[str, Any]]]:
    """The lines that the script prints, and its JSON."""
    done = run(*arguments, "--json", folder / "numbers.json")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), json.loads((folder / "numbers.json").read_text())


def tales(folder: Path, texts: list[str]) -> Path:
    file = folder / "tales.jsonl"
    lines = (json.dumps({"source": "test", "title": str(i), "text": text}) for i, text in enumerate(texts))
    file.write_text("\n".join(lines) + "\n")
    return file


def loss_of(model: Path, prompts: list[list[int]]) -> float:
    """Nats per token as the runner computes them, without an engine or a frontend."""
    from quire.kernels import options, runner

    engine = runner.load_model(options.LoadOptions(str(model), dtype="bfloat16", num_pages=16))
    losses: list[float] = []
    for prompt in prompts:
        slot = engine.sequences.open(
            prompt, len(prompt), sampling=runner.SamplingConfig(temperature=0.0, prompt_logprobs=0)
        )
        assert engine.sequences.reserve(slot, len(prompt) + 1)
        losses += [-entry[1][0] for entry in engine.run(StepInput([slot], [0], [len(prompt)])).prompt_logprobs[0]]
        engine.sequences.close(slot)
    return math.fsum(losses) / len(losses)


def test_two_formats(demo_model: Path, tmp_path: Path) -> None:
    from quire.frontend.text.tokenizer import Tokenizer

    chosen = ["--formats", "bfloat16", "int4", "--kv-cache-dtypes", "auto"]
    lines, (floats, integers) = measure(tmp_path, "--text", tales(tmp_path, TEXTS), *chosen)
    prompts = Tokenizer(demo_model).encode_batch(TEXTS)
    assert floats["tokens"] == integers["tokens"] == sum(map(len, prompts)) - len(prompts)
    assert floats["nats"] == pytest.approx(loss_of(demo_model, prompts), rel=1e-9)
    assert (floats["change_percent"], floats["error_percent"]) == (0.0, 0.0)
    assert (floats["rms"], floats["largest"], floats["kl"], floats["same_top_percent"]) == (0.0, 0.0, 0.0, 100.0)
    assert 0 < integers["rms"] < integers["largest"] < 2
    assert 0 < integers["kl"] < 0.1
    assert 60 < integers["same_top_percent"] <= 100
    assert 0 < abs(integers["nats"] - floats["nats"]) < 0.5
    assert integers["perplexity"] == pytest.approx(math.exp(integers["nats"]))
    assert integers["change_percent"] == pytest.approx(100 * (integers["perplexity"] / floats["perplexity"] - 1))
    assert integers["weight_bytes"] < floats["weight_bytes"] / 1.5
    assert [line.split()[:2] for line in lines[1:-1]] == [["bfloat16", "auto"], ["int4", "auto"]]


def test_divergence() -> None:
    """Tokens that both have are compared one by one; all others, and those that one has, are taken as one."""
    base = {1: math.log(0.5), 2: math.log(0.25), 3: math.log(0.125)}
    other = {1: math.log(0.25), 2: math.log(0.25), 4: math.log(0.25)}
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.25 / 0.5)
    divergence = runpy.run_path(str(SCRIPT))["divergence"]
    assert divergence(base, other) == pytest.approx(expected)
    assert divergence(base, base) == 0.0


FAKE_LLAMA = """#!/bin/sh
case $0 in
*llama-quantize) cp "$2" "$3"; test -s "$3" ;;
*) case $2 in *BF16*) echo "Final estimate: PPL = 20.0 +/- 1" ;; *) echo "Final estimate: PPL = 20.1 +/- 1" ;; esac ;;
esac
"""


def test_types_of_llama(demo_model: Path, tmp_path: Path) -> None:
    """The types that its programs make are read by the engine; the change that it measures itself stands beside."""
    for name in ("llama-quantize", "llama-perplexity"):
        program = tmp_path / name
        program.write_text(FAKE_LLAMA)
        program.chmod(0o755)
    model = tmp_path / "source.gguf"
    write_gguf(demo_model, model, "Q8_0")
    chosen: list[str | Path] = ["--formats", "bfloat16", "--kv-cache-dtypes", "auto"]
    chosen += ["--llama", tmp_path, "--gguf", model]
    _, (plain, q8) = measure(tmp_path, "--text", tales(tmp_path, TEXTS), *chosen, "--llama-types", "Q8_0")
    assert (plain["llama_percent"], q8["weights"]) == (None, "Q8_0")
    assert q8["llama_percent"] == pytest.approx(0.5)
    assert 0 < q8["rms"] < 0.2
    refused = run("--text", tmp_path / "tales.jsonl", "--llama", tmp_path)
    assert "--llama and --gguf go together" in refused.stderr


def test_a_text_longer_than_the_context_is_read_in_pieces(demo_model: Path, tmp_path: Path) -> None:
    from quire.frontend.text.tokenizer import Tokenizer

    text = tmp_path / "text.txt"
    text.write_text(TEXTS[0])
    token_ids = Tokenizer(demo_model).encode(TEXTS[0])
    prompts = [token_ids[start : start + 10] for start in range(0, len(token_ids) - 1, 9)]
    chosen = ["--formats", "bfloat16", "--max-model-len", "11"]
    _, (plain, small) = measure(tmp_path, "--text", text, *chosen)
    assert plain["tokens"] == small["tokens"] == len(token_ids) - 1
    assert plain["nats"] == pytest.approx(loss_of(demo_model, prompts), rel=1e-9)
    assert (plain["kv"], small["kv"]) == ("auto", "int8")
    assert 0 < abs(small["nats"] - plain["nats"]) < 0.1


def test_held_out_tales_are_those_of_the_training_script(demo_model: Path, tmp_path: Path) -> None:
    import_reference("transformers")
    from quire.frontend.text.tokenizer import Tokenizer

    corpus = tales(tmp_path, [f"Tale {i}." + " And so on." * i for i in range(20)])
    _, (found,) = measure(tmp_path, "--held-out", corpus, "--formats", "bfloat16", "--kv-cache-dtypes", "auto")
    index = random.Random(0).sample(range(20), 1)[0]
    prompt = Tokenizer(demo_model).encode(f"Tale {index}." + " And so on." * index + "<|end|>")
    assert found["tokens"] == len(prompt) - 1
    assert found["nats"] == pytest.approx(loss_of(demo_model, [prompt]), rel=1e-9)


def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time")
    assert "this model allows 3 to 2048" in run("--text", text, "--max-model-len", "4096").stderr
    text.write_text("")
    assert "fewer than 2 tokens" in run("--text", text).stderr
