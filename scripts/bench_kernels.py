"""Every kernel of a model against its own limit: `.venv/bin/python scripts/bench_kernels.py --help`.

Builds the plan of a model at its real shapes with random weights, and times each launch in whole steps, so weights are
read from memory as they are in a step. The limits are measured in the same run, between the steps: read bandwidth of
memory and cache, the peak of the multiply-add units, the cost of a launch. A kernel's limit is the largest of its bytes
over bandwidth, its operations over the peak, and one launch.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from bench import kernel_report as report
from bench.kernel_limits import Limits
from bench.kernel_steps import (
    Case,
    Model,
    RandomCheckpoint,
    choose_cases,
    first_of_each,
    kv_bytes_of,
    page_bytes,
    reads_context,
)

from quire.kernels import host
from quire.kernels._native import ThreadPool
from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.info import host_info, plan_info
from quire.kernels.operands import Kernel, Launch, Matrix
from quire.kernels.options import LoadOptions, choose_threads
from quire.kernels.plan import PlanBuilder
from quire.kernels.runner import assemble, plan_of
from quire.kernels.work import work_of

QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
}
LEAST_CAPACITY = 512


class Benchmark:
    """Times the launches of cases, and limits between them."""

    def __init__(self, model: Model, limits: Limits, isa: str, cases: list[Case], only: list[str], best: bool) -> None:
        self.limits = limits
        self._model, self.isa, self._only, self._best = model, isa, only, best
        split = [dataclasses.replace(case, step=model.split(case.step)) for case in cases]
        self.cases = [case for case in split if case.launches(model.plan, only)]
        self._seconds: dict[tuple[Case, Kernel], list[float]] = {}

    def run(self, repetitions: int, longest: float) -> None:
        """Times every case `repetitions` times, all in turn. A case whose limit exceeds `longest` seconds is run with
        fewer launches of each kernel."""
        for _ in range(3):
            self.limits.measure()
        for repetition in range(repetitions):
            for number, case in enumerate(self.cases, 1):
                if sys.stderr.isatty():
                    done = f"repetition {repetition + 1} of {repetitions}, step {number} of {len(self.cases)}"
                    print(f"\r{done}: {case.kind} {case.step.tokens} x {case.context}\33[K", end="", file=sys.stderr)
                self._run_once(case, longest)
        if sys.stderr.isatty():
            print("\r\33[K", end="", file=sys.stderr)

    def _run_once(self, case: Case, longest: float) -> None:
        launches = case.launches(self._model.plan, self._only)
        counts = Counter(launch.kernel for launch in launches)
        bound = sum(max(self._bounds(case, one).values()) * counts[one.kernel] for one in first_of_each(launches))
        launches = first_of_each(launches, min(1.0, longest / bound))
        self.limits.measure()
        times: dict[Kernel, list[float]] = {}
        for launch, seconds in zip(launches, self._model.profile(launches, case.step), strict=True):
            times.setdefault(launch.kernel, []).append(seconds)
        for kernel, seconds_of_all in times.items():
            choose = min if self._best else statistics.median
            self._seconds.setdefault((case, kernel), []).append(choose(seconds_of_all))

    def _bounds(self, case: Case, launch: Launch) -> dict[str, float]:
        work = work_of(self._model.plan, launch, case.step, self.isa)
        return report.bounds_of(work, self.limits.values(self._best), self.limits.cache_bytes)

    def results(self, case: Case) -> list[report.Result]:
        """What was found of a case, by kernel."""
        launches = case.launches(self._model.plan, self._only)
        counts = Counter(launch.kernel for launch in launches)
        found = []
        for launch in first_of_each(launches):
            kernel, samples = launch.kernel, report.spread(self._seconds[case, launch.kernel])
            work = work_of(self._model.plan, launch, case.step, self.isa)
            context = case.context if reads_context(launch) else 0
            found.append(report.Result(
                kernel.name, report.shape_of(kernel), case.kind, case.step.rows(launch), context, counts[kernel],
                samples["least" if self._best else "median"], samples["least"], samples["most"],
                work.memory + work.activations, work.operations, work.unit, self._bounds(case, launch),
            ))  # fmt: skip
        return found


def listing(plan: PlanBuilder) -> str:
    """The kernels of the plan: how often a step launches each, over how many bytes of weights."""
    lines = []
    for launch in first_of_each(plan.launches):
        same = [other for other in plan.launches if other.kernel == launch.kernel]
        sizes = [o.bytes(plan.numbers) for other in same for o in other.operands if isinstance(o, Matrix)]
        weights = f", {sum(sizes) / 2**20:.0f} MiB of matrices" if sizes else ""
        lines.append(f"{launch.kernel.name:20} {report.shape_of(launch.kernel):16} {len(same)} launches{weights}")
    return "\n".join(lines)


def numbers(text: str) -> list[int]:
    """A list like `1,2,4`."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise ValueError(text)
    return values


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows, contexts = "1,2,4,8,16,32,64,128,512,2048", "1024,64,4096,32768"
    add = parser.add_argument
    add("--model", help="folder whose config.json gives the shapes (default: Qwen3-0.6B's)")
    add("--layers", type=int, help="decoder layers, instead of the model's")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="a field of LoadOptions, as dtype=float32")
    add("--rows", type=numbers, default=numbers(rows), help=f"rows (tokens) of a step (default {rows})")
    text = f"contexts of attention, that of whole steps first (default {contexts})"
    add("--contexts", type=numbers, default=numbers(contexts), help=text)
    add("--only", action="append", default=[], metavar="NAME", help="only kernels whose name contains NAME")
    add("--list", action="store_true", help="list the model's kernels and end")
    add("--repetitions", type=int, default=5, help="times that each step is run (default 5)")
    text = "of a run; a step whose limit is longer runs fewer layers (default 1)"
    add("--seconds", type=float, default=1.0, help=text)
    add(
        "--best",
        action="store_true",
        help="take the fastest launch and the best limits, not medians: for a busy machine",
    )
    add("--kv-cache-memory-bytes", type=int, default=2 << 30, metavar="BYTES", help="KV memory at most (default 2 GiB)")
    add("--threads", type=int, help="threads that compute (default: as for serving)")
    add("--isa", help=f"one of {', '.join(host.INSTRUCTION_SETS)} (default: the best)")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    add("--figure", type=Path, metavar="FILE", help="draw shares of the limits (needs matplotlib)")
    return parser.parse_args()


def config_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The model's config.json, or Qwen3-0.6B's. A quantized checkpoint counts as one of floats: `--option
    quantization=int4` makes integers of it."""
    config = dict(QWEN3_06B)
    if arguments.model:
        config = msgspec.json.decode((Path(arguments.model) / "config.json").read_bytes(), type=dict[str, Any])
    config.pop("quantization_config", None)
    if arguments.layers:
        config["n_layer" if "n_layer" in config else "num_hidden_layers"] = arguments.layers
    return config


def options_of(arguments: argparse.Namespace) -> LoadOptions:
    """How the plan is made. A page of KV suffices: steps use memory of the benchmark's."""
    capacity = max(LEAST_CAPACITY, -(-max(arguments.rows) // 128) * 128)
    options = LoadOptions("random", max_num_batched_tokens=capacity, num_pages=1,
                          threads=arguments.threads, isa=arguments.isa)  # fmt: skip
    given = {name: value for name, _, value in (option.partition("=") for option in arguments.option)}
    known = {field.name for field in dataclasses.fields(LoadOptions)}
    if not known >= given.keys():
        raise ModelError(f"--option names {', '.join(given.keys() - known)}; there are {', '.join(sorted(known))}")
    typed: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in given.items()}
    return dataclasses.replace(options, **typed)


def document(arguments: argparse.Namespace, plan: PlanBuilder, bench: Benchmark, threads: int) -> dict[str, Any]:
    """Everything that was found, for `--json`."""
    cases = [(case, bench.results(case)) for case in bench.cases]
    results = [
        dataclasses.asdict(result) | {"limit": result.limit, "share": result.bound / result.seconds}
        for _, found in cases
        for result in found
    ]
    launch_seconds = bench.limits.values()["launch"]
    totals = [report.total_of(found, launch_seconds) for case, found in cases if case.whole and not arguments.only]
    return {
        "host": host_info() | {"isa": bench.isa, "threads": threads, "cache_bytes": bench.limits.cache_bytes},
        "plan": plan_info(plan, ModelConfig(config_of(arguments)).architecture),
        "repetitions": arguments.repetitions,
        "best": arguments.best,
        "limits": {name: report.spread(samples) for name, samples in bench.limits.samples.items()},
        "results": results,
        "steps": [dataclasses.asdict(total) for total in totals],
    }


def print_report(bench: Benchmark, whole_steps: bool) -> list[report.Result]:
    """Prints limits, kernels and whole steps; returns the results in the order of the table."""
    for name, samples in bench.limits.samples.items():
        of = report.spread(samples)
        scale, unit = (1e6, "us") if name == "launch" else (1e-9, "GB/s" if name in ("memory", "cache") else "GOP/s")
        print(f"{name:9} {of['median'] * scale:9.2f} {unit:6} {of['least'] * scale:.2f} to {of['most'] * scale:.2f}")
    by_case = {case: bench.results(case) for case in bench.cases}
    # Rows of logits in a prefill step are another step's, so each kernel stands there once for a number of rows.
    results = [r for case, found in by_case.items() for r in found if r.context or r.rows == case.step.tokens]
    order = list(dict.fromkeys(r.kernel for r in results))
    results.sort(key=lambda r: (order.index(r.kernel), r.step, r.rows, r.context))
    print("\n" + report.table(results))
    for case, found in by_case.items():
        if case.whole and whole_steps:
            print("\n" + report.step_text(report.total_of(found, bench.limits.values()["launch"])))
    return results


def prepare(arguments: argparse.Namespace, options: LoadOptions) -> tuple[PlanBuilder, Benchmark, ThreadPool]:
    """The model in memory, and the steps to time. Raises ModelError when there can't be any."""
    plan = plan_of(options, RandomCheckpoint(config_of(arguments)))
    cases = choose_cases(plan, arguments.rows, arguments.contexts, arguments.kv_cache_memory_bytes)
    if not cases:
        raise ModelError("no step fits; give more --kv-cache-memory-bytes, or smaller --rows or --contexts")
    names = ", ".join(kernel.name for kernel in plan.kernels)
    if not all(part in names for part in arguments.only):
        raise ModelError(f"--only {' '.join(arguments.only)} names no kernel; there are {names}")
    assembly = assemble(plan, options)
    isa, pool = host.choose_isa(options.isa), ThreadPool(choose_threads(options))
    page = page_bytes(plan)
    most = max(plan.layers * kv_bytes_of(plan, case.step) for case in cases)
    least = plan.limits.capacity // plan.limits.page_size * page
    model = Model(assembly, pool, max(least, min(most, arguments.kv_cache_memory_bytes // page * page)))
    limits = Limits(assembly.native, pool, isa)
    return plan, Benchmark(model, limits, isa.name, cases, arguments.only, arguments.best), pool


def main() -> int:
    """Measures and reports; returns the exit status."""
    arguments = parse()
    try:
        options = options_of(arguments)
        if arguments.figure and importlib.util.find_spec("matplotlib") is None:
            raise ModelError("--figure needs matplotlib; install it: pip install matplotlib")  # noqa: TRY301
        if arguments.list:
            print(listing(plan_of(options, RandomCheckpoint(config_of(arguments)))))
            return 0
        plan, bench, pool = prepare(arguments, options)
    except (ModelError, OSError, msgspec.DecodeError) as error:
        print(error, file=sys.stderr)
        return 1
    bench.run(arguments.repetitions, arguments.seconds)
    results = print_report(bench, whole_steps=not arguments.only)
    if arguments.json:
        arguments.json.write_bytes(
            msgspec.json.format(msgspec.json.encode(document(arguments, plan, bench, pool.size)))
        )
    if arguments.figure:
        report.figure(results, str(arguments.figure), f"{host_info()['cpu']}, {bench.isa}, {pool.size} threads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
