"""Accuracy of `quire simulate` against live engines: `.venv/bin/python scripts/validate_simulator.py --help`.

Each case is a trace with flags of `quire replay`, such as "azure.csv --duration 600 --scale-lengths 0.25 --clip". For
each case the host is calibrated, then the case is replayed on an engine of its own and simulated, and a table compares
both. The host should be otherwise idle. A measurement with too much steal time is repeated.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from quire.frontend.evaluation.replay.interference import StealTime

QUIRE = [sys.executable, "-P", "-c", "from quire.frontend.cli import main; main()"]
FIGURES = {
    "output tokens/s": ("output_throughput", "{:.0f}"),
    "TTFT p50, ms": ("median_ttft_ms", "{:.1f}"),
    "TTFT p99, ms": ("p99_ttft_ms", "{:.1f}"),
    "TPOT p50, ms": ("median_tpot_ms", "{:.2f}"),
    "TPOT p99, ms": ("p99_tpot_ms", "{:.2f}"),
    "E2E p50, ms": ("median_e2el_ms", "{:.0f}"),
    "E2E p99, ms": ("p99_e2el_ms", "{:.0f}"),
}


def quire(*arguments: str) -> None:
    """Run a command of quire with its output on stderr. Exit if it fails."""
    print("quire", shlex.join(arguments), file=sys.stderr, flush=True)
    if status := subprocess.run([*QUIRE, *arguments], stdout=sys.stderr, check=False).returncode:
        raise SystemExit(status)


def measure_quietly(arguments: argparse.Namespace, *command: str) -> None:
    """Run a command of quire until the share of steal time is at most `--max-steal`; exit if it never is."""
    for _ in range(arguments.attempts):
        steal = StealTime()
        try:
            quire(*command)
        except SystemExit:  # a calibration that cannot be trusted, for the same reason
            if (steal.share or 0.0) <= arguments.max_steal:
                raise
        share = steal.share or 0.0
        print(f"steal time: {share:.2%}", file=sys.stderr, flush=True)
        if share <= arguments.max_steal:
            return
    raise SystemExit(f"the host is not quiet: its steal time is {share:.2%}; try later, or raise --max-steal")


def measure(case: list[str], arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], ...]:
    """Return the reports of a case, live and simulated."""
    engine = shlex.split(arguments.engine)
    calibration, live, simulated = (folder / f"{name}.json" for name in ("calibration", "live", "simulated"))
    trace, *flags = case
    measure_quietly(arguments, "calibrate", "--output", str(calibration), "--seconds", str(arguments.seconds), *engine)
    measure_quietly(arguments, "replay", trace, *flags, *engine, "--warmup", "20", "--output", str(live))
    quire("simulate", "--trace", trace, *flags, "--calibration", str(calibration), "--output", str(simulated))
    return json.loads(live.read_text()), json.loads(simulated.read_text())


def row(case: list[str], live: dict[str, Any], simulated: dict[str, Any]) -> str:
    """Return a line of the table: for each figure the live value, and the deviation of the simulated one."""
    cells = []
    for name, form in FIGURES.values():
        measured, predicted = live[name], simulated[name]
        ratio = f"{predicted / measured - 1:+.0%}" if measured and predicted is not None else "-"
        cells.append(f"{form.format(measured) if measured is not None else '-'} ({ratio})")
    return f"| {Path(case[0]).stem} {' '.join(case[1:])} | {' | '.join(cells)} |"


def main() -> None:
    """Run all cases, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cases", nargs="+", help="a trace with flags of `quire replay` that select and transform requests"
    )
    parser.add_argument("--engine", default="", help="flags of the engine, such as '--model FOLDER --threads 1'")
    parser.add_argument("--seconds", type=float, default=60, help="seconds of each calibration (default 60)")
    parser.add_argument("--max-steal", type=float, default=0.005, help="largest share of steal time (default 0.005)")
    parser.add_argument("--attempts", type=int, default=5, help="attempts at a quiet measurement (default 5)")
    parser.add_argument("--keep", type=Path, help="folder in which to keep calibrations and reports")
    arguments = parser.parse_args()
    if arguments.attempts < 1:
        parser.error(f"--attempts {arguments.attempts} measures nothing; give 1 or more")
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        lines = []
        for number, case in enumerate(arguments.cases):
            own = folder / str(number)
            own.mkdir(exist_ok=True)
            words = shlex.split(case)
            lines.append(row(words, *measure(words, arguments, own)))
            print(lines[-1], file=sys.stderr, flush=True)
    print(f"| live (simulated) | {' | '.join(FIGURES)} |\n|{'---|' * (len(FIGURES) + 1)}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
