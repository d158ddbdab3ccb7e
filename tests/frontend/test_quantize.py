"""`quire quantize`: a saved model is served like any other, and what ends early leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import EngineFactory
from patience import PATIENCE
from quire_command import quire_command

from quire.frontend import LLM, SamplingParams

QUIRE = quire_command("quantize")
PROMPT = "Once upon a time there was a king who had"
NAMES = ("a king", "a fox", "an old woman", "three brothers", "the wind")


def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*QUIRE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, **options)


def logprobs(llm: LLM, prompts: list[str]) -> list[float]:
    """Return the log probabilities of the prompts' tokens."""
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    entries = [entry for output in outputs for entry in output.prompt_logprobs or () if entry]
    return [next(iter(entry.values())).logprob for entry in entries]


def nats(engine: EngineFactory, model: Path) -> float:
    """Return the nats of the prompt's tokens."""
    found = logprobs(engine(model, dtype="bfloat16"), [PROMPT])
    return -sum(found) / len(found)


@pytest.mark.parametrize("mode", ["int4", "int8"])
def test_saved_model_is_served(mode: str, demo_model: Path, engine: EngineFactory, tmp_path: Path) -> None:
    target = tmp_path / "folder" / "saved"
    done = run(demo_model, target, "--quantization", mode, "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert f"42 linear layers quantized to {mode}" in done.stdout
    assert "quire: quantizing weights\n" in done.stderr
    assert ("measuring inputs" in done.stderr) == (mode == "int4")
    assert {path.name for path in target.parent.iterdir()} == {"saved"}
    section = json.loads((target / "config.json").read_text())["quantization_config"]
    assert section["config_groups"]["group_0"]["weights"]["num_bits"] == int(mode[3:])
    assert (target / "tokenizer.json").read_bytes() == (demo_model / "tokenizer.json").read_bytes()
    assert 0 < abs(nats(engine, target) - nats(engine, demo_model)) < {"int8": 0.02, "int4": 0.2}[mode]
    again = run(demo_model, target)
    assert again.returncode == 1
    assert again.stderr == f"quire: {target} is a folder with files already; name a new one, or remove it\n"
    quantized = run(target, tmp_path / "other")
    assert quantized.returncode == 1
    assert "is quantized by compressed-tensors already; give the model in bfloat16 or float32" in quantized.stderr


@pytest.mark.parametrize(
    ("model", "output", "more", "status", "words"),
    [
        ("demo", "saved", ("--quantization", "int3"), 2, "'int3'; it must be one of int4, int8"),
        ("demo", "file", (), 1, "file is a file; name a new folder"),
        ("demo", "a\nb", (), 2, "it must be a path of printable characters"),
        ("demo", "file/saved", (), 1, "is no folder that you may write to"),
        ("nowhere", "saved", (), 1, "nowhere"),
        ("demo", "saved", ("--threads", "0"), 2, "--threads"),
    ],
)
def test_wrong_arguments(
    model: str, output: str, more: tuple[str, ...], status: int, words: str, demo_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    done = run(demo_model if model == "demo" else tmp_path / model, tmp_path / output, *more)
    assert done.returncode == status
    assert words in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_calibrated(demo_model: Path, engine: EngineFactory, tmp_path: Path) -> None:
    """A text takes a part of what int4 loses, and the saved model needs none."""
    llm, text = engine(demo_model), tmp_path / "text"
    prompts = [f"{beginning} {name}" for beginning in ("Once upon a time", "In the forest", "The") for name in NAMES]
    tales = [
        [prompt + tale.outputs[0].text for prompt, tale in zip(prompts, llm.generate(prompts, params), strict=True)]
        for params in (SamplingParams(temperature=0.8, seed=seed, max_tokens=120) for seed in (1, 2))
    ]
    text.write_text("\n".join(tales[0]))
    expected, errors = logprobs(llm, tales[1]), []
    for name, more in (("plain", ()), ("calibrated", ("--calibration", text))):
        done = run(demo_model, tmp_path / name, *more)
        assert done.returncode == 0, done.stderr
        found = logprobs(engine(tmp_path / name, dtype="bfloat16"), tales[1])
        errors.append(sum((each - other) ** 2 for each, other in zip(found, expected, strict=True)))
    assert errors[1] < 0.9 * errors[0]


@pytest.mark.parametrize(
    ("content", "more", "status", "words"),
    [
        (b"word " * 100, (), 1, "the text has fewer than 256 tokens (1"),
        (b"", (), 1, "the text has fewer than 256 tokens (1)"),
        (b"\xff\xfe" * 1000, (), 1, "is not a text in UTF-8"),
        (None, (), 1, "is a folder; give a text file"),
        (b"word " * 1000, ("--quantization", "int8"), 2, "--calibration is for int4, and --quantization is int8"),
    ],
)
def test_wrong_texts(
    content: bytes | None, more: tuple[str, ...], status: int, words: str, demo_model: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    if content is None:
        text.mkdir()
    else:
        text.write_bytes(content)
    done = run(demo_model, tmp_path / "saved", "--calibration", text, *more)
    assert done.returncode == status
    assert words in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_full_disk_leaves_nothing(demo_model: Path, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = run(demo_model, tmp_path / "saved", "--quantization", "int8", preexec_fn=limit)
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert not [*tmp_path.iterdir()]


def is_running(folder: Path) -> bool:
    """Return True while a process has the folder among its arguments."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if str(folder) in (process / "cmdline").read_text(errors="replace"):
                return True
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_ended_early_leaves_nothing(number: int, checkpoints: Path, tmp_path: Path) -> None:
    """Whatever ends the command, the process that it has started ends too, and takes away what it has written."""
    command = [*QUIRE, str(checkpoints / "llama-biases-linear"), str(tmp_path / "saved")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        deadline = time.monotonic() + PATIENCE
        while not [*tmp_path.iterdir()] and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        assert [path.name for path in tmp_path.iterdir()] != ["saved"], "it has ended"
        os.kill(process.pid, number)
        process.wait()
        while is_running(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not [*tmp_path.iterdir()]
