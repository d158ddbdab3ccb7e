"""`quire replay` as users run it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from http_server import Server
from patience import PATIENCE
from quire_command import quire_command

from quire.frontend import LLM
from quire.frontend.cli import app
from quire.frontend.cli.failures import exit_status
from quire.frontend.cli.workload import TraceFlags, open_trace, workload_of

QUIRE = quire_command()
SCRIPT = Path(__file__).parents[4] / "scripts" / "replay_trace.py"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of twelve requests in 60 milliseconds, which share their first block."""
    rows = [
        {"timestamp": 5 * place, "input_length": 40 + place, "output_length": 8, "hash_ids": [0]} for place in range(12)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def long_trace(tmp_path: Path) -> Path:
    """A trace of a request at once, one that takes long, and one in an hour."""
    rows = [(0, 8, 2), (1, 8, 2000), (3_600_000, 8, 2)]
    path = tmp_path / "long.jsonl"
    lines = [
        json.dumps({"timestamp": time, "input_length": prompt, "output_length": output, "hash_ids": [0]})
        for time, prompt, output in rows
    ]
    path.write_text("\n".join(lines))
    return path


def run(*arguments: object, command: list[str] = QUIRE) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    subcommand = ["replay"] if command is QUIRE else []
    whole = [*command, *subcommand, *map(str, arguments)]
    return subprocess.run(whole, capture_output=True, text=True, timeout=PATIENCE, check=False)


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start the command."""
    return subprocess.Popen(
        [*QUIRE, "replay", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def load(path: Path) -> dict[str, Any]:
    """Load a report."""
    return dict(json.loads(path.read_text()))


def test_a_trace_is_replayed_to_an_engine_of_its_own(trace: Path, tmp_path: Path) -> None:
    output, page = tmp_path / "report.json", tmp_path / "report.html"
    flags = ("--speed", 2, "--max-requests", 10, "--warmup", 2, "--num-pages", 64)
    done = run(trace, *flags, "--output", output, "--html", page, "--goodput", "ttft:60000", "tpot:60000")
    assert done.returncode == 0, done.stderr
    report = load(output)
    assert (report["completed"], report["num_prompts"], report["warm_up"]) == (10, 10, 2)
    assert report["total_output_tokens"] == 80
    assert report["goodput_limits"] == {"ttft": 60000, "tpot": 60000}
    assert report["replay_sched_lag_p99"] >= 0
    assert 0 <= report["replay_steal_share"] < 1
    assert report["cached_tokens"] > 0
    assert report["config"]["speed"] == 2
    assert "TTFT" in done.stdout
    assert page.read_text().startswith("<!")


def test_a_failed_warm_up_is_reported(trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    row = {"timestamp": 0, "input_length": 100_000, "output_length": 8, "hash_ids": [0] * 196}
    trace.write_text(f"{json.dumps(row)}\n{trace.read_text()}")
    done = run(trace, "--warmup", 2, "--num-pages", 64, "--output", output)
    assert done.returncode == 0, done.stderr
    assert "1 requests of the warm-up did not complete, for example errored: " in done.stderr
    assert (load(output)["warm_up"], load(output)["warm_up_failed"]) == (2, 1)


def test_the_script_is_the_command_and_targets_a_running_engine(trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    with LLM(num_pages=64) as llm:
        flags = ("--engine-address", llm.engine_address, "--concurrency", 3, "--output", output)
        done = run(trace, *flags, command=[sys.executable, "-P", str(SCRIPT)])
    assert done.returncode == 0, done.stderr
    assert load(output)["max_concurrency"] == 3
    assert load(output)["completed"] == 12


def test_a_server_is_a_target_and_runs_are_compared(trace: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    with Server.start("--num-pages", "64") as server:
        for output in (first, second):
            done = run(trace, "--base-url", server.url, "--rate", "inf", "--output", output)
            assert done.returncode == 0, done.stderr
            assert load(output)["completed"] == 12
    done = run("--compare", first, second, "--html", tmp_path / "both.html")
    assert done.returncode == 0, done.stderr
    assert "TTFT" in done.stdout
    assert (tmp_path / "both.html").exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_and_keeps_the_measurements(
    long_trace: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    output = tmp_path / "report.json"
    with LLM(num_pages=64) as llm:
        process = start(long_trace, "--engine-address", llm.engine_address, "--output", output)
        wait_until_running(llm)
        engine = llm._engine.engines.ready.engine_pid
        os.kill(engine, signal.SIGSTOP)  # else the request may end first where the host is busy
        try:
            process.send_signal(number)
            _, err = process.communicate(timeout=PATIENCE)
        finally:
            os.kill(engine, signal.SIGCONT)
    assert process.returncode == status, err
    report = load(output)
    assert (report["completed"], report["unfinished"]) == (1, 2)
    assert not report["valid"]
    assert number.name in report["invalid_reason"]


def test_a_dying_engine_ends_the_run_and_keeps_the_measurements(long_trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    with LLM(num_pages=64, max_restarts=0) as llm:
        process = start(
            long_trace, "--engine-address", llm.engine_address, "--reconnect-timeout", "0", "--output", output
        )
        wait_until_running(llm)
        os.kill(llm._engine.engines.ready.engine_pid, signal.SIGKILL)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert re.search(
        r"quire: the run ended early: the connection to the engine was lost: the engine at \S+ has gone", err
    )
    report = load(output)
    assert (report["completed"], report["errored"], report["unfinished"], report["failed"]) == (1, 1, 1, 2)


def wait_until_running(llm: LLM) -> None:
    """Wait until the second request has been running alone for a while."""
    while (stats := llm.stats())["totals"]["decode_tokens"] < 200 or stats["running"] != 1:
        pass  # each look is a round trip to the engine


def test_a_trace_that_breaks_ends_the_run_with_its_line_unless_bad_rows_are_skipped(
    trace: Path, tmp_path: Path
) -> None:
    trace.write_text(trace.read_text() + "{rubbish\n")
    output = tmp_path / "report.json"
    with LLM(num_pages=64) as llm:
        done = run(trace, "--engine-address", llm.engine_address, "--output", output)
        assert done.returncode == 1
        assert "trace.jsonl:13" in done.stderr
        assert load(output)["completed"] == 12
        done = run(trace, "--engine-address", llm.engine_address, "--skip-bad", "--output", output)
    assert done.returncode == 0, done.stderr
    assert "1 bad rows" in done.stderr
    assert load(output)["config"]["skipped_rows"] == 1


def test_a_ramp_over_a_pipe_asks_for_the_number_of_requests(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    ramp = TraceFlags(format="mooncake", ramp_up_start_rps=1, ramp_up_end_rps=2)
    with pytest.raises(typer.BadParameter, match="can be read only once; give --max-requests"):
        workload_of(open_trace(pipe, ramp), ramp, None)
    counted = replace(ramp, max_requests=5)
    workload_of(open_trace(pipe, counted), counted, None)  # reads nothing yet


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ((), 2, "nothing to replay"),
        (("no-such-file.csv",), 1, "no-such-file.csv"),
        (("TRACE", "--engine-address", "ipc:///tmp/no-engine-here"), 1, "no engine listens"),
        (("TRACE", "--base-url", "http://127.0.0.1:1"), 1, "no server answers"),
        (("TRACE", "--base-url", "http://127.0.0.1:1", "--threads", 1), 2, "--threads"),
        (("TRACE", "--api-key", "x"), 2, "--base-url"),
        (("TRACE", "--goodput", "ttft:20", "speed:1"), 2, "speed:1"),
        (("TRACE", "--concurrency", 1, "--max-concurrency", 1), 2, "give one of them"),
        (("TRACE", "--concurrency", 1, "--ramp-up-start-rps", 1), 2, "--ramp-up-start-rps samples arrivals"),
        (("TRACE", "--save-detailed"), 2, "give --output FILE"),
        (("--compare", "SAVED", "--speed", 2, "--warmup", 3), 2, "--speed, --warmup applies to a replay; give a TRACE"),
        (("--compare", "SAVED", "--goodput", "ttft:1"), 2, "--goodput applies to a new run"),
        (
            ("TRACE", "--base-url", "http://127.0.0.1:1", "--endpoint-type", "chat", "--prompt-as", "tokens"),
            2,
            "a chat",
        ),
        (("TRACE", "--output", "no-such-folder/report.json"), 1, "--output"),
        (("TRACE", "--ramp-up-start-rps", 1), 2, "--ramp-up-end-rps"),
        (("--compare", "no-such-file.json"), 1, "no-such-file.json"),
        (("TRACE", "--base-url", "http://127.0.0.1:1", "--compare", "no-such-file.json"), 1, "no-such-file.json"),
        (("TRACE", "--html", "a.html", "--compare", *["SAVED"] * 6), 2, "at most 6 runs, and with --compare"),
        (("--html", "a.html", "--compare", *["SAVED"] * 7), 2, "compare with fewer, or omit --html"),
    ],
)
def test_invalid_flags_are_rejected_at_once(
    trace: Path,
    arguments: tuple[object, ...],
    status: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved = trace.with_name("saved.json")
    saved.write_text('{"duration": 1, "completed": 1, "request_throughput": 1}')
    files = {"TRACE": trace, "SAVED": saved}
    given = [str(files.get(str(word), word)) for word in arguments]
    monkeypatch.setattr(sys, "argv", ["quire", "replay", *given])
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of which kind is for `exit_status` to know
        app.run()
    assert exit_status(caught.value) == status
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
