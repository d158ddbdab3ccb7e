"""How near `quire simulate` comes to live engines: `.venv/bin/python scripts/validate_simulator.py --help`.

Each case is a trace with flags of `quire replay`, such as "azure.csv --duration 600 --scale-lengths 0.25 --clip". For
each the host is calibrated, then the case is replayed on an engine of its own and simulated, and a table tells both.
The host should have nothing else to do. What was measured while others on its hypervisor took CPU time from it is
measured again.
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
    """Runs a command of quire; its words go to stderr. Ends the program if it fails."""
    print("quire", shlex.join(arguments), file=sys.stderr, flush=True)
    if status := subprocess.run([*QUIRE, *arguments], stdout=sys.stderr, check=False).returncode:
        raise SystemExit(status)


def measure_quietly(arguments: argparse.Namespace, *command: str) -> None:
    """Runs a command of quire until at most `--stolen` of the CPU time was stolen meanwhile; ends if it never is."""
    for _ in range(arguments.attempts):
        stolen = StealTime()
        quire(*command)
        share = stolen.share or 0.0
        print(f"stolen CPU time: {share:.2%}", file=sys.stderr, flush=True)
        if share <= arguments.stolen:
            return
    raise SystemExit(f"the host is not quiet: {share:.2%} of its CPU time went to others; try later, or raise --stolen")


def measure(case: list[str], arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], ...]:
    """The reports of a case, live and simulated."""
    engine = shlex.split(arguments.engine)
    calibration, live, simulated = (folder / f"{name}.json" for name in ("calibration", "live", "simulated"))
    trace, *flags = case
    measure_quietly(arguments, "calibrate", "--output", str(calibration), "--seconds", str(arguments.seconds), *engine)
    measure_quietly(arguments, "replay", trace, *flags, *engine, "--warmup", "20", "--output", str(live))
    quire("simulate", "--trace", trace, *flags, "--calibration", str(calibration), "--output", str(simulated))
    return json.loads(live.read_text()), json.loads(simulated.read_text())


def row(case: list[str], live: dict[str, Any], simulated: dict[str, Any]) -> str:
    """A line of the table: for each figure the live value, and the simulated one as a part of it."""
    cells = []
    for name, form in FIGURES.values():
        measured, guessed = live[name], simulated[name]
        ratio = f"{guessed / measured - 1:+.0%}" if measured and guessed is not None else "-"
        cells.append(f"{form.format(measured) if measured is not None else '-'} ({ratio})")
    return f"| {Path(case[0]).stem} {' '.join(case[1:])} | {' | '.join(cells)} |"


def main() -> None:
    """Runs all cases, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", help="a trace, and flags of `quire replay` that choose and change requests")
    parser.add_argument("--engine", default="", help="flags of the engine, such as '--model FOLDER --threads 1'")
    parser.add_argument("--seconds", type=float, default=60, help="of each calibration (default 60)")
    parser.add_argument("--stolen", type=float, default=0.005, help="CPU time that others may have (default 0.005)")
    parser.add_argument("--attempts", type=int, default=5, help="at a quiet measurement (default 5)")
    parser.add_argument("--keep", type=Path, help="folder for calibrations and reports")
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
