"""`quire simulate` as users run it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from calibrations import calibration_file
from patience import PATIENCE
from quire_command import quire_command
from simulations import BLOCK, chats

from quire.frontend.cli import app
from quire.frontend.cli.failures import exit_status
from quire.frontend.evaluation.simulation.progress import SimulationProgress
from quire.protocol.routing.routers import ROUTERS

QUIRE = quire_command()


def trace_file(folder: Path, count: int = 60) -> Path:
    """Write chats as a trace in Mooncake's format, with blocks of 512 tokens instead of `BLOCK`."""
    path = folder / "trace.jsonl"
    rows = [
        {
            "timestamp": round(each.arrival * 1000),
            "input_length": 1 + each.prompt_tokens % BLOCK + 512 * (len(each.blocks) - 1),
            "output_length": each.output_tokens,
            "hash_ids": each.blocks,
        }
        for each in chats(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Arguments for a trace and a calibration."""
    trace, calibration = trace_file(tmp_path), calibration_file(tmp_path, engine={"max_model_len": 20000})
    return ["--trace", str(trace), "--calibration", str(calibration)]


def test_a_calibration_that_is_not_to_be_trusted_is_named(tmp_path: Path) -> None:
    calibration = calibration_file(tmp_path, engine={"max_model_len": 20000})
    written = json.loads(calibration.read_text())
    calibration.write_text(json.dumps({**written, "doubts": ["the host was busy"]}))
    done = run("--trace", str(trace_file(tmp_path, 3)), "--calibration", str(calibration))
    assert done.returncode == 0, done.stderr
    assert f"{calibration} is not to be trusted: the host was busy" in done.stderr.splitlines()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*QUIRE, "simulate", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
        timeout=PATIENCE,
        check=False,
    )


def test_a_run_is_reported_as_a_replay_is(files: list[str], tmp_path: Path) -> None:
    output, page = tmp_path / "o.json", tmp_path / "o.html"
    done = run(
        *files, "--engines", "3", "--router", "sticky", "--speed", "2", "--goodput", "ttft:900", "tpot:50",
        "--num-pages", "4000", "--output", str(output), "--html", str(page),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "trace.jsonl on 3 engines, sticky (simulated)" in done.stdout
    report = json.loads(output.read_text())
    assert (report["completed"], report["simulated"], len(report["engines"])) == (60, True, 3)
    assert report["config"]["engine"]["num_pages"] == 4000
    assert report["config"]["router"] == "sticky"
    assert "3 engines, sticky" in page.read_text()
    again = run(*files, "--engines", "3", "--router", "sticky", "--speed", "2", "--num-pages", "4000")
    assert done.stdout.splitlines()[2:9] == again.stdout.splitlines()[2:9]


def test_prefixes_are_fetched_unless_the_flag_says_no(files: list[str], tmp_path: Path) -> None:
    output = tmp_path / "o.json"
    for flags, fetches in ([], True), (["--no-fetch-prefixes"], False):
        done = run(*files, "--engines", "2", *flags, "--output", str(output))
        assert done.returncode == 0, done.stderr
        assert ("fetch_seconds" in json.loads(output.read_text())["config"]) == fetches


def test_routers_are_compared_and_bad_rows_reported_once(files: list[str], tmp_path: Path) -> None:
    output, trace = tmp_path / "o.json", Path(files[1])
    trace.write_text(f"{trace.read_text()}{{rubbish\n")
    done = run(*files, "--skip-bad", "--engines", "2", "--router", "all", "--output", str(output))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("1 bad rows of the trace were skipped, for example ") == 1
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == list(ROUTERS)
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    for router in ROUTERS:
        config = json.loads((tmp_path / f"o-{router}.json").read_text())["config"]
        assert (config["router"], config["skipped_rows"]) == (router, 1)
        assert f"o-{router}.json" in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("written: ")


def test_skipped_bad_rows_are_reported(files: list[str], tmp_path: Path) -> None:
    output, trace = tmp_path / "o.json", Path(files[1])
    trace.write_text(f"{trace.read_text()}{{rubbish\n")
    done = run(*files, "--skip-bad", "--output", str(output))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("1 bad rows of the trace were skipped, for example ") == 1
    assert json.loads(output.read_text())["config"]["skipped_rows"] == 1


def test_results_before_a_bad_row_are_saved(files: list[str], tmp_path: Path) -> None:
    output, trace = tmp_path / "o.json", Path(files[1])
    trace.write_text(f"{trace.read_text()}{{rubbish\n")
    done = run(*files, "--output", str(output))
    assert done.returncode == 1
    assert f"{trace}:61" in done.stderr
    report = json.loads(output.read_text())
    assert (report["completed"], report["valid"]) == (60, False)
    assert f"{trace}:61" in report["invalid_reason"]


def test_ctrl_c_saves_the_results_so_far(files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: SimulationProgress, seconds: float, requests: int) -> None:
        if requests >= 20:
            raise KeyboardInterrupt

    output = tmp_path / "o.json"
    monkeypatch.setattr(SimulationProgress, "show", interrupt)
    assert app.app(["simulate", *files, "--output", str(output)], standalone_mode=False) == 130
    report = json.loads(output.read_text())
    assert (report["completed"] >= 20, report["valid"]) == (True, False)
    assert report["duration"] > 0
    assert "KeyboardInterrupt" in report["invalid_reason"]


def test_the_fewest_engines_and_each_try_are_reported(files: list[str]) -> None:
    done = run(*files, "--find", "engines", "--goodput", "ttft:1500", "--attainment", "0.9")
    assert done.returncode == 0, done.stderr
    tries = [int(number) for number in re.findall(r"^(\d+) engines: .* meet the limits", done.stderr, re.MULTILINE)]
    found = re.search(r"the fewest engines that meet the limits: (\d+)", done.stderr)
    assert found is not None
    assert tries[:2] == [1, 2]
    assert {int(found[1]), int(found[1]) - 1} <= set(tries)
    assert f"on {found[1]} engines" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--router", "nobody"], "--router nobody is not known; it can be round-robin, least-loaded"),
        (["--find", "engines"], "--find needs the limits to meet; give --goodput"),
        (["--find", "money", "--goodput", "ttft:1"], "--find money is not known"),
        (["--find", "engines", "--router", "all"], "name that --router"),
        (["--figure", "f.png"], "give --router all"),
        (["--router", "all", "--compare", "saved.json"], "name one --router"),
        (["--find", "engines", "--goodput", "ttft:1", "--engines", "2"], "omit --engines"),
        (["--attainment", "0.9"], "--attainment applies to a search for engines; give --find engines"),
        (["--max-engines", "9"], "--max-engines applies to a search for engines; give --find engines"),
        (["--concurrency", "4", "--rate", "2"], "--rate samples arrivals, and with --concurrency"),
        (["--rate", "inf", "--burstiness", "2"], "--burstiness 2 shapes the gaps between requests"),
        (["--save-detailed"], "--save-detailed applies to the JSON; give --output"),
        (["--vocab-size", "9"], "a simulation sends none; omit it"),
        (["--calibration", "none.json"], "none.json cannot be read"),
        (["--trace", "none.jsonl"], "none.jsonl"),
        (["--scheduling-policy", "luck"], "scheduling_policy='luck' is not possible; it must be one of fcfs"),
        (["--find", "engines", "--goodput", "ttft:1"], "engines are not enough: 0.00% of the requests"),
    ],
)
def test_invalid_flags_are_rejected(
    files: list[str],
    arguments: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path(files[1]).with_name("saved.json").write_text('{"duration": 1, "completed": 1, "request_throughput": 1}')
    monkeypatch.chdir(Path(files[1]).parent)
    monkeypatch.setattr(sys, "argv", ["quire", "simulate", *files, *arguments])
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of which kind is for `exit_status` to know
        app.run()
    assert exit_status(caught.value) in (1, 2)
    assert expected in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("several", [["--router", "all"], ["--find", "engines", "--goodput", "ttft:1"]])
def test_a_pipe_is_not_read_several_times(files: list[str], tmp_path: Path, several: list[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    given = ["--trace", str(tmp_path / "pipe"), *files[2:], *several]
    with pytest.raises(typer.BadParameter, match=r"several times, and .*pipe is a pipe; write it to a file"):
        app.app(["simulate", *given], standalone_mode=False)


# The kernel gives the signal to another thread, so that nothing interrupts what the main one waits for: as if it came
# just before the main thread begins to wait.
MISSED = f"""import signal, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
{QUIRE[-1]}"""


@pytest.mark.parametrize("quire", [QUIRE, [*QUIRE[:-1], MISSED]], ids=["interrupts", "missed"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_its_process(tmp_path: Path, quire: list[str], number: signal.Signals) -> None:
    trace, calibration = tmp_path / "pipe", calibration_file(tmp_path)
    os.mkfifo(trace)
    command = [*quire, "simulate", "--trace", str(trace), "--calibration", str(calibration), "--format", "mooncake"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        with trace.open("w") as feed:  # opens when the simulation wants its first request
            tasks = Path(f"/proc/{process.pid}/task")
            children = [pid for each in tasks.glob("*/children") for pid in each.read_text().split()]
            process.send_signal(number)
            process.wait(PATIENCE)
            del feed
        assert process.returncode == 128 + number
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert len(children) == 1
    assert not Path(f"/proc/{children[0]}").exists()
