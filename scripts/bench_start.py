"""Start time and memory of the engine: `.venv/bin/python scripts/bench_start.py --help`.

Times `quire complete` from the start of the process to the first byte of its answer, several times, and reads the
engine's peak resident memory (VmHWM) at that moment. The first run may compile kernels, so it is reported separately.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench.running_server import children_of

PROMPT = "Once upon a time"


def descendants(pid: int) -> list[int]:
    """Return the descendants of a process."""
    try:
        children = children_of(pid)
    except OSError:
        return []
    return children + [below for child in children for below in descendants(child)]


def peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def start_once(model: list[str], tokens: int) -> tuple[float, int]:
    """Return the seconds to the first byte of the answer, and the engine's peak memory in bytes by then."""
    quire = str(Path(sys.executable).with_name("quire"))
    command = [quire, "complete", *model, "--max-tokens", str(tokens), PROMPT]
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise SystemExit(f"no answer from: {' '.join(command)}")
        seconds = time.perf_counter() - begun
        peak = max((peak_bytes(pid) for pid in descendants(process.pid)), default=0)
        process.stdout.read()
    return seconds, peak


def main() -> None:
    """Print the first time, then the median and spread of the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder; the demo model by default")
    parser.add_argument("--max-model-len", help="context length in tokens")
    parser.add_argument("--runs", type=int, default=5, help="starts after the first (default 5)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of the answer (default 32)")
    arguments = parser.parse_args()
    model = ["--model", arguments.model] if arguments.model else []
    if arguments.max_model_len:
        model += ["--max-model-len", arguments.max_model_len]
    first, _ = start_once(model, arguments.tokens)
    runs = [start_once(model, arguments.tokens) for _ in range(arguments.runs)]
    seconds = [run[0] for run in runs]
    print(f"first start {first:.2f} s")
    print(f"then median {statistics.median(seconds):.2f} s, {min(seconds):.2f} to {max(seconds):.2f} s")
    print(f"engine's peak resident memory {max(run[1] for run in runs) / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
