"""`quire bench` as users run it."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from patience import PATIENCE
from quire_command import quire_command

from quire.frontend import LLM
from quire.frontend.cli.app import app

QUIRE = quire_command("bench")
SHORT = ("--input-len", 40, "--output-len", 3)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Address of a running engine."""
    with LLM(num_pages=64) as llm:
        yield llm.engine_address


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    whole = [*QUIRE, *map(str, arguments)]
    return subprocess.run(whole, capture_output=True, text=True, timeout=PATIENCE, check=False)


def load(path: Path) -> dict[str, Any]:
    """Load a report."""
    return dict(json.loads(path.read_text()))


def test_latency(address: str, tmp_path: Path) -> None:
    output = tmp_path / "latency.json"
    flags = ("--batch-size", 2, "--num-iters", 3, "--num-iters-warmup", 1, "--output", output)
    done = run("latency", *SHORT, *flags, "--engine-address", address)
    assert done.returncode == 0, done.stderr
    assert "2 x 40 to 3 tokens" in done.stdout
    report = load(output)
    assert len(report["latencies"]) == 3
    assert report["percentiles"]["10"] <= report["avg_latency"] <= report["percentiles"]["99"]
    assert report["config"]["batch_size"] == 2


def test_throughput(address: str, tmp_path: Path) -> None:
    output = tmp_path / "throughput.json"
    flags = ("--num-prompts", 12, "--prefix-len", 64, "--range-ratio", 0.5, "--output", output)
    done = run("throughput", *SHORT, *flags, "--engine-address", address)
    assert done.returncode == 0, done.stderr
    report = load(output)
    assert report["num_requests"] == report["completed"] == 12
    assert report["total_num_tokens"] == report["total_input_tokens"] + report["total_output_tokens"]
    assert report["tokens_per_second"] == pytest.approx(report["total_num_tokens"] / report["elapsed_time"])
    assert 12 * (64 + 20) <= report["total_input_tokens"] <= 12 * (64 + 60)
    assert report["request_rate"] == "inf"


def test_throughput_of_a_trace(address: str, tmp_path: Path) -> None:
    output, trace = tmp_path / "throughput.json", tmp_path / "trace.jsonl"
    rows = [{"timestamp": 10**6 * place, "input_length": 9, "output_length": 2, "hash_ids": [0]} for place in range(9)]
    trace.write_text("{rubbish\n" + "".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--num-prompts", 5, "--skip-bad", "--output", output)
    done = run("throughput", "--trace", trace, *flags, "--engine-address", address)
    assert done.returncode == 0, done.stderr
    assert (load(output)["completed"], load(output)["total_input_tokens"]) == (5, 45)
    assert load(output)["config"]["skipped_rows"] == 1
    assert "were to be sent" not in done.stderr
    done = run("throughput", "--trace", trace, "--skip-bad", "--num-prompts", 20, "--engine-address", address)
    assert "the trace has 9 requests, and 20 were to be sent" in done.stderr


def test_serve_at_a_rate_and_by_users(address: str, tmp_path: Path) -> None:
    output = tmp_path / "serve.json"
    flags = ("--num-prompts", 8, "--output", output, "--engine-address", address)
    done = run("serve", *SHORT, "--request-rate", 100, "--burstiness", 2, "--num-warmups", 2, *flags)
    assert done.returncode == 0, done.stderr
    report = load(output)
    assert (report["completed"], report["request_rate"], report["burstiness"], report["warm_up"]) == (8, 100, 2, 2)
    assert done.stdout.count("TTFT") == 1
    assert report["prefix_hit_rate"] == 0
    done = run("serve", *SHORT, "--max-concurrency", 2, *flags)
    assert done.returncode == 0, done.stderr
    report = load(output)
    assert report["prefix_hit_rate"] == 0  # though the same prompts were sent before
    assert report["max_concurrent_requests"] <= report["max_concurrency"] == 2
    assert report["valid"]


def test_serve_in_a_ramp(address: str, tmp_path: Path) -> None:
    output = tmp_path / "serve.json"
    ramp = ("--ramp-up-start-rps", 50, "--ramp-up-end-rps", 100, "--ramp-up-strategy", "exponential")
    done = run("serve", *SHORT, *ramp, "--num-prompts", 5, "--engine-address", address, "--output", output)
    assert done.returncode == 0, done.stderr
    assert (load(output)["completed"], load(output)["request_rate"]) == (5, None)
    assert load(output)["config"]["ramp_up_end_rps"] == 100


def test_sweep(address: str, tmp_path: Path) -> None:
    output, page = tmp_path / "sweep.json", tmp_path / "sweep.html"
    limits = ("--goodput", "ttft:60000", "tpot:60000")
    flags = ("--low", 100, "--high", 200, "--num-prompts", 4, "--output", output, "--html", page)
    done = run("sweep", *SHORT, *limits, *flags, "--engine-address", address)
    assert done.returncode == 0, done.stderr
    assert [line.split(",")[0] for line in done.stderr.splitlines()[:2]] == [
        "100 requests/s: met",
        "200 requests/s: met",
    ]
    assert "200 requests/s meet the limits, and more may" in done.stdout
    report = load(output)
    assert report["highest_rate"] == 200
    assert report["goodput_limits"] == {"ttft": 60000, "tpot": 60000}
    assert [each["completed"] for each in report["runs"]] == [4, 4]
    assert page.read_text().startswith("<!")


def test_a_sweep_of_impossible_limits_fails_and_is_saved(address: str, tmp_path: Path) -> None:
    output = tmp_path / "sweep.json"
    flags = ("--goodput", "ttft:0.0001", "--low", 100, "--num-prompts", 4, "--output", output)
    done = run("sweep", *SHORT, *flags, "--engine-address", address)
    assert done.returncode == 1
    assert "quire: even 100 requests/s miss the limits: 0 % of the requests" in done.stderr
    assert load(output)["highest_rate"] is None


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_sweep_and_keeps_the_results_so_far(
    address: str, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    output = tmp_path / "sweep.json"
    sizes = ("--input-len", 8, "--output-len", 400, "--num-prompts", 4)
    flags = ("--goodput", "ttft:60000", "--low", 100, "--output", output, "--engine-address", address)
    command = [*QUIRE, "sweep", *map(str, (*sizes, *flags))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("100 requests/s: met")
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == status, err
    report = load(output)
    assert report["interrupted"] == f"it was stopped by {number.name}"
    assert report["highest_rate"] >= 100
    assert report["runs"][-1]["unfinished"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("latency", "--output", "no-such-folder/latency.json"), "--output"),
        (("throughput", "--trace", "no-such-file.csv"), "no-such-file.csv"),
        (("throughput", "--clip"), "--clip belongs to a trace"),
        (
            ("throughput", "--trace", "no-such-file.csv", "--input-len", "8"),
            "--input-len belongs to synthetic requests",
        ),
        (("serve", "--request-rate", "0"), "rate=0.0 is out of range"),
        (("serve", "--request-rate", "-1"), "rate=-1.0 is out of range"),
        (("serve", "--request-rate", "1", "--burstiness", "0"), "burstiness=0.0 is out of range"),
        (("serve", "--ramp-up-start-rps", "1"), "--ramp-up-end-rps"),
        (("sweep",), "give --goodput"),
        (("sweep", "--goodput", "ttft:0"), "--goodput ttft:0"),
        (("sweep", "--goodput", "ttft:9", "--low", "0"), "--low 0 is out of range"),
        (("sweep", "--goodput", "ttft:9", "--seconds", "1", "--num-prompts", "1"), "give one of them"),
        (("sweep", "--goodput", "ttft:9", "--html", "no-such-folder/sweep.html"), "--html"),
    ],
)
def test_invalid_flags_are_rejected_before_an_engine_starts(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises((ValueError, OSError, typer.BadParameter), match=words):
        app(["bench", *arguments], standalone_mode=False)


@pytest.mark.parametrize("command", ["latency", "throughput", "serve", "sweep"])
def test_lengths_beyond_the_context_are_rejected(command: str, address: str) -> None:
    limits = ["--goodput", "ttft:9"] if command == "sweep" else []
    with pytest.raises(ValueError, match="lower --input-len from 2000 to 1920 or less"):
        app(["bench", command, "--input-len", "2000", *limits, "--engine-address", address], standalone_mode=False)
