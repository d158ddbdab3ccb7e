"""Benchmark of models, alone and in turns with a peer; it leaves no process behind (see conftest)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.work import BatchTiming, Decode, SequenceTiming
from patience import PATIENCE

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_model.py"
FAKE_SERVER = Path(__file__).with_name("fake_llama_server.py")
SMALL = ["--threads", "1", "--prefill", "32", "--decode", "1x16,2x16", "--gen", "8"]


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def llama(folder: Path, text: str) -> list[str | Path]:
    """Write an executable `llama-server` with this text and a model file; return the arguments for them."""
    program = folder / "llama-server"
    program.write_text(text)
    program.chmod(0o755)
    (folder / "tiny.gguf").write_bytes(bytes(1000))
    return ["--llama", folder, "--gguf", folder / "tiny.gguf"]


def fake_server(folder: Path) -> list[str | Path]:
    return llama(folder, f'#!/bin/sh\nexec {sys.executable} {FAKE_SERVER} "$@"\n')


def results(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["results"]
    return found


def test_a_decode_counts_from_where_all_sequences_run() -> None:
    work = Decode(batch=3, context=2048, length=5)
    assert work.max_tokens() == [7, 6, 5], "prompts start one a step, and all end together"
    starts = [1.0, 2.0, 3.0]
    sequences = [SequenceTiming(first, 7.0, count - 1) for first, count in zip(starts, work.max_tokens(), strict=True)]
    timing = BatchTiming(8.0, tuple(sequences))
    assert work.rate(timing) == pytest.approx(3), "a token a second each"
    assert work.overlap(timing) == 1


def test_quire_alone(tmp_path: Path, demo_model: Path) -> None:
    done = bench("--model", demo_model, *SMALL, "--reps", "1", "--json", tmp_path / "samples.json")
    assert done.returncode == 0, done.stderr
    found = results(tmp_path / "samples.json")
    assert [entry["work"] for entry in found] == ["prefill 32", "decode 1x16", "decode 2x16"]
    assert all(entry["work"] in done.stdout for entry in found)
    for entry in found:
        assert entry["engine"] == "Quire"
        assert len(entry["tokens_per_second"]) == len(entry["seconds"]) == 1
        assert entry["median"] > 0
    prefill, decode = found[:2]
    assert prefill["median"] == pytest.approx(32 / prefill["seconds"][0])
    assert decode["step_bytes"] > 1_000_000
    assert decode["limit"] == pytest.approx(decode["bandwidth"][0] / decode["step_bytes"])


def test_quire_and_a_peer_take_turns(tmp_path: Path) -> None:
    work = ["--prefill", "", "--decode", "2x16", "--gen", "8", "--reps", "2", "--threads", "1"]
    done = bench(*work, *fake_server(tmp_path), "--json", tmp_path / "samples.json")
    assert done.returncode == 0, done.stderr
    turns = [line.split(": ")[0] for line in done.stderr.splitlines() if line.startswith("decode")]
    names = ["Quire", "llama.cpp tiny -fa on", "llama.cpp tiny -fa off"]
    assert turns == [f"decode 2x16, {number} of 2, {name}" for number in (1, 2) for name in names]
    for entry in results(tmp_path / "samples.json")[1:]:
        assert entry["tokens_per_second"] == pytest.approx([2 * 1000 / 2] * 2), "a token each 2 ms, two sequences"


def test_async(tmp_path: Path) -> None:
    work = ["--async", "--prefill", "16", "--decode", "1x16", "--gen", "400", "--reps", "1", "--threads", "1"]
    done = bench(*work, "--json", tmp_path / "samples.json")
    assert done.returncode == 0, done.stderr
    assert [entry["median"] > 0 for entry in results(tmp_path / "samples.json")] == [True, True]


def test_a_peer_that_dies_is_quoted(tmp_path: Path) -> None:
    done = bench(*SMALL, *llama(tmp_path, "#!/bin/sh\necho out of luck >&2\nexit 3\n"))
    assert done.returncode == 1
    assert "ended with status 3 while starting" in done.stderr
    assert "out of luck" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vllm", "/nowhere"], "give the folder of a virtual environment with vLLM"),
        (["--llama", "/nowhere", "--gguf", "/nowhere/x.gguf"], "it has no llama-server"),
        (["--llama", "/nowhere"], "--llama and --gguf belong together"),
        (["--decode", "8by64"], "'8by64' is not BATCHxCONTEXT"),
        (["--prefill", "100000"], "prefill 100000 needs 100001 positions"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_errors_are_reported_in_one_line(arguments: list[str], message: str) -> None:
    done = bench("--threads", "1", *arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_benchmark_ends_its_processes(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, SCRIPT, *SMALL, "--reps", "100000", *fake_server(tmp_path)]
    with subprocess.Popen(
        list(map(str, command)), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        while "3 of 100000" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert "Traceback" not in errors
