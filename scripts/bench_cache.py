"""Cost of the prefix cache and the scheduler: `.venv/bin/python scripts/bench_cache.py --help`.

First the seconds a token of each operation of the cache, in trees of a thousand to a million pages: `match` of a
sequence anywhere in the tree, then, as sequences arrive and the pool is full, `evict` of the oldest pages, `insert`
(start and share) and `release` of the newest, and whole steps of the engine around a model that answers at once. Except
for effects of the CPU's caches, the cost must not depend on the size of the tree: the last column is the ratio of the
medians in the largest and the smallest tree.

Then the pauses of many clients that search trees, under constant eviction: the time for which each step (schedule,
update, send) keeps the model waiting, by the wall clock and by the thread's CPU time; other load on the host shows only
in the former.

With --check only random operations on the tree run, against a dictionary of all prefixes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cache_model import check_random_operations
from bench.cache_operations import ROOM, FullCache
from bench.cache_shapes import SHAPES
from bench.instant_engine import InstantEngine
from bench.pauses import search_trees

from quire.engine_core.scheduling.policies import POLICIES

MOST_RATIO = 3.0  # a token's cost in the largest tree to that in the smallest
MOST_PAUSE = 2e-3  # seconds
STEP_CLIENTS = 16
STEP_ANSWER = 32  # tokens
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999, "max": 1.0}

Figures = dict[str, dict[str, float]]
"""By operation, quantiles of seconds a token."""


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return the quantiles named in QUANTILES."""
    ordered = sorted(values)
    return {name: ordered[min(int(len(ordered) * part), len(ordered) - 1)] for name, part in QUANTILES.items()}


def measure_operations(shape: str, nodes: int, arguments: argparse.Namespace) -> Figures:
    """Fill a tree, then time its operations and the steps of an engine that goes on with it."""
    cache = FullCache(shape, nodes, arguments.block_size, arguments.seed)
    cache.measure(arguments.repetitions)
    engine = InstantEngine(
        cache.sequences, arguments.block_size, nodes + ROOM, policy=arguments.policy, max_num_seqs=STEP_CLIENTS
    )
    engine.add_clients([cache.shape] * STEP_CLIENTS, STEP_ANSWER)
    steps = [engine.step() for _ in range(arguments.repetitions)]
    seconds = cache.seconds | {"step": [step.wall / step.tokens for step in steps]}
    return {operation: quantiles(values) for operation, values in seconds.items()}


def nanoseconds(seconds: dict[str, float]) -> str:
    """Format the median (and p99)."""
    return f"{seconds['p50'] * 1e9:.2f} ({seconds['p99'] * 1e9:.2f})"


def print_operations(shape: str, found: dict[int, Figures]) -> float:
    """Print a table; return the largest ratio."""
    smallest, largest = min(found), max(found)
    heads = "".join(f"{nodes:>18,} pages" for nodes in found)
    print(f"\n{shape}: ns a token, median (p99)\n{'':10}{heads}{'ratio':>8}")
    ratios = []
    for operation in found[smallest]:
        cells = "".join(f"{nanoseconds(of[operation]):>24}" for of in found.values())
        ratios.append(found[largest][operation]["p50"] / found[smallest][operation]["p50"])
        print(f"{operation:10}{cells}{ratios[-1]:8.2f}")
    return max(ratios)


def measure_pauses(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the clients and print the pauses."""
    run = search_trees(
        clients=arguments.clients,
        steps=arguments.steps,
        block_size=arguments.block_size,
        num_pages=arguments.num_pages,
        answer_tokens=arguments.answer,
        policy=arguments.policy,
        seed=arguments.seed,
    )
    found: dict[str, Any] = {
        "wall": quantiles([step.wall for step in run.steps]),
        "cpu": quantiles([step.cpu for step in run.steps]),
        "too_long": sum(step.cpu > MOST_PAUSE for step in run.steps),
        "steps": len(run.steps),
        "requests": run.num_requests,
        "tokens": sum(step.tokens for step in run.steps),
        "evictions": run.stats.evictions,
        "preemptions": run.stats.preemptions,
        "collections": run.num_collections,
        "garbage": run.num_garbage,
    }
    print(
        f"\n{arguments.clients} clients, {arguments.num_pages:,} pages, {arguments.policy}: {found['steps']:,} steps, "
        f"{found['requests']:,} requests, {found['tokens']:,} tokens, {found['evictions']:,} pages evicted, "
        f"{found['preemptions']:,} preemptions\n{'pause, ms':10}{''.join(f'{name:>9}' for name in QUANTILES)}"
    )
    for kind in ("wall", "cpu"):
        print(f"{kind:10}{''.join(f'{seconds * 1e3:9.3f}' for seconds in found[kind].values())}")
    print(f"garbage collections: {run.num_collections}; objects that one would have freed: {run.num_garbage}")
    return found


def check(count: int, seed: int) -> None:
    """Run random operations against the dictionary."""
    began = time.perf_counter()
    check_random_operations(count, seed)
    seconds = time.perf_counter() - began
    print(f"{count:,} random operations with seed {seed}: the tree equals the dictionary ({seconds:.0f} s)")


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=[10**3, 10**5, 10**6], metavar="N", help="pages of trees"
    )
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES), help="(default both)")
    parser.add_argument("--repetitions", type=int, default=5000, metavar="N", help="of each operation (default 5000)")
    parser.add_argument("--block-size", type=int, default=32, metavar="TOKENS", help="(default 32)")
    parser.add_argument("--policy", default="fcfs", choices=sorted(POLICIES), help="scheduling policy (default fcfs)")
    parser.add_argument("--clients", type=int, default=256, metavar="N", help="clients that search trees (default 256)")
    parser.add_argument("--steps", type=int, default=20_000, metavar="N", help="steps; 0: none (default 20000)")
    parser.add_argument(
        "--num-pages", type=int, default=20_000, metavar="N", help="pages of the clients' pool (default 20000)"
    )
    parser.add_argument(
        "--answer", type=int, default=96, metavar="TOKENS", help="length of the clients' answers (default 96)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--check", type=int, metavar="N", help="only run N random operations against a dictionary")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures, in seconds")
    arguments = parser.parse_args()
    if arguments.check is not None:
        check(arguments.check, arguments.seed)
        return
    figures: dict[str, Any] = {"operations": {}, "ratios": {}}
    for shape in arguments.shapes:
        found = {nodes: measure_operations(shape, nodes, arguments) for nodes in sorted(arguments.nodes)}
        figures["operations"][shape] = found
        figures["ratios"][shape] = print_operations(shape, found)
    print(f"\nlargest ratio {max(figures['ratios'].values()):.2f}; the target is at most {MOST_RATIO:g}")
    if arguments.steps:
        figures["pauses"] = measure_pauses(arguments)
        print(
            f"{figures['pauses']['too_long']} pauses took more than {MOST_PAUSE * 1e3:g} ms of a CPU; the target is 0"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
