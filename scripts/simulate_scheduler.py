"""Simulation of the real scheduler in virtual time: `.venv/bin/python scripts/simulate_scheduler.py --help`.

    simulate_scheduler.py trace mooncake.jsonl                       the prefix hit rate with unlimited pages
    simulate_scheduler.py trace mooncake.jsonl --pages 30000 100000 --policy fcfs lpm --speed 3 --figure hits.png
    simulate_scheduler.py trace azure.csv --pages 2000 --speed 4     preemptions under overload
    simulate_scheduler.py mixed                                      a long prompt among short chats

Everything except the executor is the engine's: KV pages, prefix cache, policies, admission, prefill budget. A step
takes BASE + PREFILL * prompt tokens + DECODE * decoding sequences. Answers have the trace's lengths, which are unknown
to the scheduler. The queue is unbounded, so that all runs serve the same requests.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from bench.mixed import MixedLoad
from bench.simulation import Simulation

from quire.engine_core.scheduling.policies import POLICIES
from quire.frontend.evaluation.workload.lines import TraceError
from quire.frontend.evaluation.workload.reading import read_trace
from quire.frontend.evaluation.workload.sharing import infinite_cache_hits, shared_blocks
from quire.frontend.evaluation.workload.transforms import speed_up
from quire.protocol.engine_shape import EngineShape
from quire.protocol.simulation import StepTime

VOCAB_SIZE = 1 << 14
NO_BOUND = 1 << 60


def limits_for(lengths: Sequence[int], num_pages: int | None, policy: str, args: argparse.Namespace) -> EngineShape:
    """Return limits for requests of these lengths in tokens; `num_pages` None: enough for all of them together."""
    return EngineShape(
        vocab_size=VOCAB_SIZE,
        max_model_len=max(lengths) + 1,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=args.block_size,
        num_pages=num_pages or sum(-(-length // args.block_size) for length in lengths),
        scheduling_policy=policy,
        max_waiting_requests=NO_BOUND,
        max_waiting_tokens=NO_BOUND,
    )


def simulate_trace(args: argparse.Namespace) -> dict[str, Any]:
    """Simulate each policy and number of pages; print the figures of each."""
    requests = list(speed_up(read_trace(args.trace, max_requests=args.requests), args.speed))
    prompt_tokens = sum(request.prompt_tokens for request in requests)
    infinite = infinite_cache_hits(requests, args.block_size) / prompt_tokens
    print(
        f"{len(requests)} requests in {requests[-1].arrival:.0f} s, {prompt_tokens} prompt tokens; "
        f"an unbounded cache finds {infinite:.2%} ({shared_blocks(requests):.2%} of the blocks)"
    )
    lengths = [request.prompt_tokens + request.output_tokens for request in requests]
    runs = []
    for num_pages, policy in product(args.pages or [None], args.policy):
        began = time.perf_counter()
        simulation = Simulation(limits_for(lengths, num_pages, policy, args), StepTime(*args.step_seconds))
        simulation.run(requests)
        runs.append(simulation.report() | {"real_seconds": time.perf_counter() - began})
        print(describe(runs[-1]), flush=True)
    return {"infinite_hit_rate": infinite, "shared_blocks": shared_blocks(requests), "runs": runs}


def simulate_mixed(args: argparse.Namespace) -> dict[str, Any]:
    """Simulate one run; print its figures."""
    load = MixedLoad(args.chats, args.long, args.short)
    limits = limits_for([load.longest] * (load.chats + 2), None, "fcfs", args)
    found = load.run(limits, StepTime(*args.step_seconds))
    alone, mixed = found["itl_alone_seconds"], found["itl_mixed_seconds"]
    print(
        f"inter-token latency of {load.chats} chats: p99 {alone['p99'] * 1e3:.1f} ms alone, "
        f"{mixed['p99'] * 1e3:.1f} ms with a prompt of {load.long_tokens} tokens "
        f"({found['itl_growth_p99']:.2f} times; p50 {mixed['p50'] * 1e3:.1f}, max {mixed['most'] * 1e3:.1f} ms)\n"
        f"TTFT of the long prompt {found['long_ttft_seconds']:.2f} s, of a short one that arrived a step "
        f"later {found['short_ttft_seconds']:.2f} s, {found['short_ttft_steps']} steps, "
        f"{found['short_ttft_chunk_times']:.1f} chunk times"
    )
    return found


def describe(run: dict[str, Any]) -> str:
    """Describe a run in two lines."""
    ttft, itl = run["ttft_seconds"], run["itl_seconds"]
    return (
        f"{run['policy']:8} {run['pages']:9} pages: hit rate {run['hit_rate']:.2%}, {run['preemptions']} preemptions "
        f"({run['preemptions'] / run['requests']:.2%}), {run['wasted_tokens']} tokens wasted, "
        f"{run['evictions']} evictions, passed over at most {run['most_passed_over']} times "
        f"(overtaken {run['most_overtaken']})\n"
        f"    {run['served']} served in {run['seconds']:.0f} s, running {run['running_mean']:.1f}, "
        f"waiting {run['waiting_mean']:.1f} (max {run['waiting_most']:.0f}), pages held {run['held_mean']:.1%}; "
        f"TTFT p50 {ttft['p50']:.2f} p99 {ttft['p99']:.2f} s, ITL p50 {itl['p50'] * 1e3:.1f} "
        f"p99 {itl['p99'] * 1e3:.1f} ms; simulated in {run['real_seconds']:.0f} s"
    )


def save_figure(found: dict[str, Any], block_size: int, path: Path) -> None:
    """Draw the hit rate against the pool's size, a line for each policy. Needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit("--figure needs matplotlib; `pip install matplotlib` brings it") from error
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for policy in dict.fromkeys(run["policy"] for run in found["runs"]):
        runs = [run for run in found["runs"] if run["policy"] == policy]
        axis.plot(
            [run["pages"] * block_size / 1e6 for run in runs], [run["hit_rate"] for run in runs], "o-", label=policy
        )
    axis.axhline(found["infinite_hit_rate"], color="black", linestyle="dashed", linewidth=1, label="unbounded")
    axis.set(xscale="log", ylim=(0, None), xlabel="KV pool, million tokens", ylabel="prompt tokens found in the cache")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:  # an extension that matplotlib does not know
        raise SystemExit(f"--figure {path}: {error}") from error


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def factor(text: str) -> float:
    """Parse a finite number above 0."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return number


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    trace = commands.add_parser("trace", help="serve a trace")
    trace.add_argument("trace", type=Path, help="Mooncake's JSON lines, or a CSV file of Azure or BurstGPT")
    trace.add_argument("--requests", type=positive, metavar="N", help="only the first N")
    trace.add_argument("--speed", type=factor, default=1.0, help="factor by which requests arrive faster (default 1)")
    trace.add_argument(
        "--pages", type=positive, nargs="+", metavar="N", help="KV pages (default: enough for all requests)"
    )
    trace.add_argument("--policy", nargs="+", choices=POLICIES, default=["fcfs"], help="(default fcfs)")
    trace.add_argument("--figure", type=Path, help="draw hit rates against pages here, as .png or .svg")
    mixed = commands.add_parser("mixed", help="a long prompt, then a short one, among decoding chats")
    mixed.add_argument("--chats", type=positive, default=16, metavar="N", help="(default 16)")
    mixed.add_argument(
        "--long", type=positive, default=8000, metavar="TOKENS", help="length of the long prompt (default 8000)"
    )
    mixed.add_argument(
        "--short", type=positive, default=32, metavar="TOKENS", help="length of the short prompt (default 32)"
    )
    for command, times in ((trace, (0.01, 1e-5, 1e-4)), (mixed, (0.03, 7e-4, 1e-3))):
        names = "BASE", "PREFILL", "DECODE"
        text = f"seconds of a step, and of each prompt token and decode in it (default {' '.join(map(str, times))})"
        command.add_argument("--step-seconds", type=factor, nargs=3, metavar=names, default=times, help=text)
        command.add_argument("--block-size", type=int, choices=(16, 32, 64, 128), default=32, help="(default 32)")
        command.add_argument("--max-num-seqs", type=positive, default=256, metavar="N", help="(default 256)")
        command.add_argument("--max-num-batched-tokens", type=positive, default=8192, metavar="N",
                             help="(default 8192)")  # fmt: skip
        command.add_argument("--json", type=Path, help="write all figures here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command, print the figures, and save them with --json and --figure."""
    args = parse_arguments(arguments)
    try:
        found = simulate_trace(args) if args.command == "trace" else simulate_mixed(args)
    except TraceError as error:
        raise SystemExit(f"{error}") from error
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.command == "trace" and args.figure:
        save_figure(found, args.block_size, args.figure)


if __name__ == "__main__":
    main()
