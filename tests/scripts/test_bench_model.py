"""Benchmark of models, alone and in turns with a peer; it leaves no process behind (see conftest)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.work import BatchTiming, Decode
from patience import PATIENCE

from quire.frontend.version import installed_version

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_model.py"
FAKE_SERVER = Path(__file__).with_name("fake_llama_server.py")
FAKE_TOKEN_SECONDS = 0.001
SMALL = ["--threads", "1", "--prefill", "32", "--decode", "1x16,2x16", "--gen", "256"]


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
    (folder / "CMakeCache.txt").write_text("GGML_NATIVE:BOOL=ON\nGGML_AMX:BOOL=OFF\nCMAKE_BUILD_TYPE:STRING=Release\n")
    return llama(folder, f'#!/bin/sh\nexec {sys.executable} {FAKE_SERVER} "$@"\n')


def results(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["results"]
    return found


def steps(first: int, count: int) -> list[tuple[float, int]]:
    """Return the arrivals of a sequence that begins at second `first`, and has a token each second."""
    return [(float(first + number), 1) for number in range(count)]


def test_a_decode_counts_what_arrives_while_all_sequences_run() -> None:
    timing = BatchTiming(20.0, (steps(1, 12), [(2.0, 1), (4.0, 2), (13.0, 9)], steps(5, 12)))
    assert timing.window == (5.0, 12.0)
    assert timing.share == pytest.approx(7 / 15)
    assert timing.rate == pytest.approx((7 + 0 + 7) / 7), "the nine tokens come when the first one has ended"


def test_a_decode_whose_sequences_hardly_run_together_has_no_rate() -> None:
    work = Decode(batch=2, context=16, length=8)
    timing = BatchTiming(20.0, (steps(1, 8), steps(5, 8)))
    assert timing.share == pytest.approx(3 / 11)
    with pytest.raises(ValueError, match=r"all 2 sequences ran together for 27% of the decode.*longer --gen"):
        work.rate(timing)
    assert work.rate(BatchTiming(20.0, (steps(1, 8), steps(2, 8)))) == pytest.approx(2)
    with pytest.raises(ValueError, match="for 0% of the decode"):
        work.rate(BatchTiming(20.0, (steps(1, 8), steps(12, 8))))


def test_a_run_that_is_not_a_figure_is_an_error(demo_model: Path) -> None:
    work = ["--prefill", "", "--decode", "8x1900", "--gen", "3", "--reps", "1", "--threads", "1"]
    done = bench("--model", demo_model, *work)
    assert done.returncode == 1
    assert "choose a longer --gen" in done.stderr
    assert "tok/s" not in done.stdout


def test_quire_alone(tmp_path: Path, demo_model: Path) -> None:
    done = bench("--model", demo_model, *SMALL, "--gen", "1200", "--reps", "1", "--json", tmp_path / "samples.json")
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
    work = ["--prefill", "", "--decode", "2x16", "--gen", "1200", "--reps", "2", "--threads", "1"]
    done = bench(*work, *fake_server(tmp_path), "--json", tmp_path / "samples.json")
    assert done.returncode == 0, done.stderr
    turns = [line.split(": ")[0] for line in done.stderr.splitlines() if line.startswith("decode")]
    names = ["Quire", "llama.cpp tiny -fa on", "llama.cpp tiny -fa off"]
    assert turns == [f"decode 2x16, {number} of 2, {name}" for number in (1, 2) for name in names]
    builds = json.loads((tmp_path / "samples.json").read_text())["builds"]
    assert [(build["name"], build["version"], build["threads"]) for build in builds] == [
        ("Quire", installed_version(), 1), ("llama.cpp", "4242", 1), ("llama.cpp", "4242", 1),
    ]  # fmt: skip
    ours, flash, plain = builds
    assert "ISA " in ours["flags"]
    assert ours["commands"][0].startswith("LLM(model=")
    assert flash["commit"] == "0a1b2c3d"
    assert flash["flags"] == "gcc 12 for x86_64, GGML_NATIVE=ON, CMAKE_BUILD_TYPE=Release, CPU features AVX2 FMA"
    assert "--flash-attn off" in plain["commands"][0]
    for text in (f"Quire {installed_version()}, commit ", "llama.cpp 4242, commit 0a1b2c3d; gcc 12", "--flash-attn on"):
        assert text in done.stdout
    for entry in results(tmp_path / "samples.json")[1:]:
        assert max(entry["tokens_per_second"]) < 2 / FAKE_TOKEN_SECONDS, "two sequences"


def test_async(tmp_path: Path) -> None:
    work = ["--async", "--prefill", "16", "--decode", "1x16", "--gen", "400", "--reps", "1", "--threads", "1"]
    done = bench(*work, "--json", tmp_path / "samples.json")
    assert done.returncode == 0, done.stderr
    assert [entry["median"] > 0 for entry in results(tmp_path / "samples.json")] == [True, True]


def test_texts_are_prompts_and_peers_draft(tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('"Once upon a time there was a king, and the king had a daughter, and the daughter a raven."\n')
    own = [
        "--speculative-config",
        '{"method": "ngram"}',
        "--llama-spec-type",
        "ngram-simple",
        "--llama-flash-attn",
        "on",
    ]
    work = ["--prefill", "", "--decode", "1x16", "--gen", "400", "--reps", "1", "--threads", "1", "--texts", str(texts)]
    done = bench(*work, *own, *fake_server(tmp_path), "--json", tmp_path / "samples.json")
    assert done.returncode == 0, done.stderr
    names = ["Quire", "Quire ngram", "llama.cpp tiny", "llama.cpp tiny ngram-simple"]
    assert [entry["engine"] for entry in results(tmp_path / "samples.json")] == names
    done = bench("--prefill", "", "--decode", "1x160", "--reps", "1", "--threads", "1", "--texts", str(texts))
    assert done.returncode == 1
    assert "and 160 are to be its prompt; give longer texts" in done.stderr
    assert "Traceback" not in done.stderr


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
