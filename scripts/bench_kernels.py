"""Benchmark of every kernel of a model against its limit: `.venv/bin/python scripts/bench_kernels.py --help`.

This builds the plan of a model at its real shapes with random weights and times each launch in whole steps, so that
weights are read from memory as in serving. The limits are measured in the same run, between the steps: read bandwidth
of memory and cache, the peak of the multiply-add units, the cost of a launch. A kernel's limit is the largest of its
bytes over bandwidth, its operations over the peak, and one launch.
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
from bench.kernel_limits import HostLimits
from bench.kernel_steps import (
    BenchModel,
    RandomCheckpoint,
    StepCase,
    choose_cases,
    first_of_each,
    kv_bytes_of,
    page_bytes,
    reads_context,
)
from bench.torch_gemms import TorchGemms

from quire.kernels.config import ModelConfig
from quire.kernels.devices.cpu import Cpu
from quire.kernels.devices.instruction_sets import INSTRUCTION_SETS, choose_isa
from quire.kernels.emit.context import Kernel
from quire.kernels.emit.gemm import GemmKernel
from quire.kernels.errors import ModelError
from quire.kernels.host import cache_folder
from quire.kernels.info import host_info, plan_info
from quire.kernels.operands import Launch, Matrix
from quire.kernels.options import LoadOptions, choose_threads
from quire.kernels.plan import ModelPlan
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
MIN_BATCHED_TOKENS = 512


class Benchmark:
    """Times the launches of cases, and the limits between them."""

    def __init__(
        self, model: BenchModel, limits: HostLimits, cases: list[StepCase], only: list[str], best: bool,
        torch: TorchGemms | None,
    ) -> None:  # fmt: skip
        self.limits = limits
        self._model, self._only, self._best = model, only, best
        split = [dataclasses.replace(case, step=model.split(case.step)) for case in cases]
        self.cases = [case for case in split if case.launches(model.plan, only)]
        self._seconds: dict[tuple[StepCase, Kernel], list[float]] = {}
        self._torch = torch
        self._torch_seconds: dict[tuple[StepCase, Kernel], list[float]] = {}

    def run(self, repetitions: int, longest: float) -> None:
        """Time every case `repetitions` times, in turn.

        A case whose limit exceeds `longest` seconds runs with fewer launches of each kernel.
        """
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

    def _run_once(self, case: StepCase, longest: float) -> None:
        launches = case.launches(self._model.plan, self._only)
        counts = Counter(launch.kernel for launch in launches)
        bound = sum(max(self._bounds(case, one).values()) * counts[one.kernel] for one in first_of_each(launches))
        launches = first_of_each(launches, min(1.0, longest / bound))
        self.limits.measure()
        times: dict[Kernel, list[float]] = {}
        for launch, seconds in zip(launches, self._model.profile(launches, case.step), strict=True):
            times.setdefault(launch.kernel, []).append(seconds)
        choose = min if self._best else statistics.median
        for kernel, seconds_of_all in times.items():
            self._seconds.setdefault((case, kernel), []).append(choose(seconds_of_all))
        for launch in first_of_each(launches):
            if self._torch and isinstance(launch.kernel, GemmKernel):
                seconds = choose(self._torch.profile(launch.kernel, case.step.rows(launch)))
                self._torch_seconds.setdefault((case, launch.kernel), []).append(seconds)

    def _bounds(self, case: StepCase, launch: Launch) -> dict[str, float]:
        work = work_of(self._model.plan, launch, case.step)
        return report.bounds_of(work, self.limits.values(self._best), self.limits.cache_bytes)

    def results(self, case: StepCase) -> list[report.KernelResult]:
        """Return the results of a case, by kernel."""
        launches = case.launches(self._model.plan, self._only)
        counts = Counter(launch.kernel for launch in launches)
        found = []
        for launch in first_of_each(launches):
            kernel, samples = launch.kernel, report.spread(self._seconds[case, launch.kernel])
            work = work_of(self._model.plan, launch, case.step)
            context = case.context if reads_context(launch) else 0
            torch_samples = self._torch_seconds.get((case, kernel))
            found.append(report.KernelResult(
                kernel.name, kernel.shape, case.kind, case.step.rows(launch), context, counts[kernel],
                samples["least" if self._best else "median"], samples["least"], samples["most"],
                work.memory + work.activations, work.operations, work.unit, self._bounds(case, launch),
                report.spread(torch_samples)["least" if self._best else "median"] if torch_samples else None,
            ))  # fmt: skip
        return found


def listing(plan: ModelPlan) -> str:
    """List the kernels of the plan, with their launches in a step and the bytes of their weights."""
    lines = []
    for launch in first_of_each(plan.launches):
        same = [other for other in plan.launches if other.kernel == launch.kernel]
        sizes = [o.bytes(plan.dtypes) for other in same for o in other.operands if isinstance(o, Matrix)]
        weights = f", {sum(sizes) / 2**20:.0f} MiB of matrices" if sizes else ""
        lines.append(f"{launch.kernel.name:20} {launch.kernel.shape:16} {len(same)} launches{weights}")
    return "\n".join(lines)


def integers(text: str) -> list[int]:
    """Parse a list like `1,2,4`."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise ValueError(text)
    return values


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows, contexts = "1,2,4,8,16,32,64,128,512,2048", "1024,64,4096,32768"
    add = parser.add_argument
    add("--model", help="folder whose config.json gives the shapes (default: Qwen3-0.6B's)")
    add("--layers", type=int, help="decoder layers, instead of the model's")
    add(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of LoadOptions, for example dtype=float32",
    )
    add("--rows", type=integers, default=integers(rows), help=f"rows (tokens) of a step (default {rows})")
    text = f"contexts of attention, the one of whole steps first (default {contexts})"
    add("--contexts", type=integers, default=integers(contexts), help=text)
    add("--only", action="append", default=[], metavar="NAME", help="only kernels whose name contains NAME")
    add("--list", action="store_true", help="list the model's kernels and exit")
    add("--repetitions", type=int, default=5, help="number of times that each step runs (default 5)")
    text = "longest run of a step; a step whose limit is longer runs fewer layers (default 1)"
    add("--seconds", type=float, default=1.0, help=text)
    add(
        "--best",
        action="store_true",
        help="use the fastest launch and the best limits instead of medians, for a busy machine",
    )
    add("--kv-cache-memory-bytes", type=int, default=2 << 30, metavar="BYTES", help="KV memory at most (default 2 GiB)")
    add("--threads", type=int, help="compute threads (default: as in serving)")
    add("--isa", help=f"one of {', '.join(INSTRUCTION_SETS)} (default: the best)")
    add("--torch", action="store_true", help="time torch.mm in f32 in turns with each GEMM, on as many threads")
    add("--json", type=Path, metavar="FILE", help="write all results to FILE")
    add("--figure", type=Path, metavar="FILE", help="draw the shares of the limits into FILE (needs matplotlib)")
    return parser.parse_args()


def config_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the model's config.json, or Qwen3-0.6B's.

    A quantized checkpoint is treated as a float one; `--option quantization=int4` quantizes it.
    """
    config = dict(QWEN3_06B)
    if arguments.model:
        config = msgspec.json.decode((Path(arguments.model) / "config.json").read_bytes(), type=dict[str, Any])
    config.pop("quantization_config", None)
    if arguments.layers:
        config["n_layer" if "n_layer" in config else "num_hidden_layers"] = arguments.layers
    return config


def options_of(arguments: argparse.Namespace) -> LoadOptions:
    """Return the options of the plan. One KV page is enough, since steps use the benchmark's own memory."""
    tokens = max(MIN_BATCHED_TOKENS, -(-max(arguments.rows) // 128) * 128)
    options = LoadOptions("random", max_num_batched_tokens=tokens, num_pages=1,
                          threads=arguments.threads, isa=arguments.isa)  # fmt: skip
    given = {name: value for name, _, value in (option.partition("=") for option in arguments.option)}
    known = {field.name for field in dataclasses.fields(LoadOptions)}
    if not known >= given.keys():
        raise ModelError(f"--option names {', '.join(given.keys() - known)}; fields are {', '.join(sorted(known))}")
    typed: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in given.items()}
    return dataclasses.replace(options, **typed)


def document(arguments: argparse.Namespace, plan: ModelPlan, bench: Benchmark, threads: int) -> dict[str, Any]:
    """Return all results, for `--json`."""
    cases = [(case, bench.results(case)) for case in bench.cases]
    results = [
        dataclasses.asdict(result) | {"limit": result.limit, "share": result.bound / result.seconds}
        for _, found in cases
        for result in found
    ]
    launch_seconds = bench.limits.values()["launch"]
    totals = [report.total_of(found, launch_seconds) for case, found in cases if case.whole and not arguments.only]
    return {
        "host": host_info() | {"isa": plan.context.isa, "threads": threads, "cache_bytes": bench.limits.cache_bytes},
        "plan": plan_info(plan, ModelConfig(config_of(arguments)).architecture),
        "repetitions": arguments.repetitions,
        "best": arguments.best,
        "limits": {name: report.spread(samples) for name, samples in bench.limits.samples.items()},
        "results": results,
        "steps": [dataclasses.asdict(total) for total in totals],
    }


def print_report(bench: Benchmark, whole_steps: bool) -> list[report.KernelResult]:
    """Print limits, kernels and whole steps; return the results in the order of the table."""
    for name, samples in bench.limits.samples.items():
        of = report.spread(samples)
        scale, unit = (1e6, "us") if name == "launch" else (1e-9, "GB/s" if name in ("memory", "cache") else "GOP/s")
        print(f"{name:9} {of['median'] * scale:9.2f} {unit:6} {of['least'] * scale:.2f} to {of['most'] * scale:.2f}")
    by_case = {case: bench.results(case) for case in bench.cases}
    # Logit rows of a prefill step are listed by another step, so each kernel is listed once per number of rows.
    results = [r for case, found in by_case.items() for r in found if r.context or r.rows == case.step.tokens]
    order = list(dict.fromkeys(r.kernel for r in results))
    results.sort(key=lambda r: (order.index(r.kernel), r.step, r.rows, r.context))
    print("\n" + report.table(results))
    for case, found in by_case.items():
        if case.whole and whole_steps:
            print("\n" + report.step_text(report.total_of(found, bench.limits.values()["launch"])))
    return results


def prepare(arguments: argparse.Namespace, options: LoadOptions) -> tuple[ModelPlan, Benchmark, int]:
    """Load the model and choose the steps to time. Raises ModelError if no step fits."""
    plan = plan_of(options, RandomCheckpoint(config_of(arguments)))
    cases = choose_cases(plan, arguments.rows, arguments.contexts, arguments.kv_cache_memory_bytes)
    if not cases:
        raise ModelError("no step fits; give more --kv-cache-memory-bytes, or smaller --rows or --contexts")
    names = ", ".join(kernel.name for kernel in plan.kernels)
    if not all(part in names for part in arguments.only):
        raise ModelError(f"--only {' '.join(arguments.only)} matches no kernel; kernels are {names}")
    assembly = assemble(plan, options)
    cpu = Cpu(choose_isa(options.isa), cache_folder(), choose_threads(options))
    page = page_bytes(plan)
    most = max(len(plan.kv_layers) * kv_bytes_of(plan, case.step) for case in cases)
    least = plan.limits.max_num_batched_tokens // plan.limits.block_size * page
    model = BenchModel(assembly, max(least, min(most, arguments.kv_cache_memory_bytes // page * page)))
    limits = HostLimits(cpu)
    torch = TorchGemms(cpu.native.threads, limits.cache_bytes) if arguments.torch else None
    return plan, Benchmark(model, limits, cases, arguments.only, arguments.best, torch), cpu.native.threads


def main() -> int:
    """Measure and report; return the exit status."""
    arguments = parse()
    try:
        options = options_of(arguments)
        if arguments.figure and importlib.util.find_spec("matplotlib") is None:
            raise ModelError("--figure needs matplotlib; install it: pip install matplotlib")  # noqa: TRY301
        if arguments.list:
            print(listing(plan_of(options, RandomCheckpoint(config_of(arguments)))))
            return 0
        plan, bench, threads = prepare(arguments, options)
    except (ModelError, OSError, msgspec.DecodeError) as error:
        print(error, file=sys.stderr)
        return 1
    bench.run(arguments.repetitions, arguments.seconds)
    results = print_report(bench, whole_steps=not arguments.only)
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(document(arguments, plan, bench, threads))))
    if arguments.figure:
        report.figure(results, str(arguments.figure), f"{host_info()['cpu']}, {plan.context.isa}, {threads} threads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
