"""Seeded simulation of the whole with faults: `.venv/bin/python scripts/robustness.py faults --help`.

Clients, supervisor and engines run on a virtual clock and network (`tests/support/fault_simulation/`). Each seed is a
run with faults of its own; one in which a request is lost, changed or left waiting, or a KV page is, is printed with
what was wrong, and with `--verbose` all that happened before. The same seed does the same again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fault_simulation.simulation import Outcome

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

_SEEDS_OF_PROCESS = 100  # threads that die with a simulated process leave memory behind


def run_silently(seed: int) -> Outcome:
    """Return the outcome of a seed."""
    from fault_simulation.simulation import run, silence

    with silence():
        return run(seed)


def main() -> int:
    """Run seeds; return 1 if one of them has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many (1000)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first one (0)")
    parser.add_argument("--verbose", action="store_true", help="print the trace of each seed that fails")
    arguments = parser.parse_args()

    from fault_simulation.simulation import run, silence

    injected: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    num_pages: Counter[str] = Counter()
    num_failed = num_events = 0
    seconds = 0.0
    begun = time.perf_counter()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    with multiprocessing.get_context("spawn").Pool(maxtasksperchild=_SEEDS_OF_PROCESS) as pool, silence():
        for outcome in pool.imap(run_silently, seeds):
            injected += outcome.injected
            ends += outcome.ends
            num_pages += outcome.num_pages
            num_events += outcome.num_events
            seconds += outcome.seconds
            if outcome.problems:
                num_failed += 1
                trace = run(outcome.seed, is_traced=True).trace if arguments.verbose else []
                print(f"seed {outcome.seed}:", *trace, *outcome.problems, sep="\n  ", flush=True)
    took = time.perf_counter() - begun
    print(
        f"{arguments.seeds} seeds, {num_failed} failed, in {took:.0f} s ({60 * arguments.seeds / took:.0f} a minute): "
        f"{num_events} events in {seconds / 3600:.1f} virtual hours"
    )
    for title, counter in (("faults", injected), ("ends of requests", ends), ("KV pages", num_pages)):
        print(f"{title}:")
        for name, count in counter.most_common():
            print(f"  {count:8} {name}")
    return num_failed > 0
