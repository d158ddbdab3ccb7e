"""Check a GPU: tokens and log probabilities are the CPU's, bit for bit, for the demo model and for small random models.
With fast_matmul they are those of other chunks.

Then it measures steps, and torch and transformers beside them, where those are installed and find the GPU. What there
is no time for in --seconds is left out, and said to be. A process of its own computes, which is ended if it takes 10 s
longer, so that a summary is printed whatever happens. The exit status is 0 if all that was compared is equal, 1 if
something differs, failed or was cut off, and 2 if there is no GPU.

    scripts/check_gpu                          # on a machine with a GPU; its --wheel brings Quire along
    scripts/check_gpu --only int8,gemma        # the cases whose names contain one of these
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from bench.torch_gpu import PeerError, compare_gemms, compare_model
from bench.work_speed import WorkSpeed
from make_checkpoint import SHAPES, chosen_layers, write_weights

from quire.kernels import _native
from quire.kernels.errors import ModelError
from quire.kernels.options import LoadOptions
from quire.kernels.runner import ModelRunner, SamplingConfig, TokenMask, load_model
from quire.kernels.step import StepInput

DEMO_MODEL = Path(__file__).resolve().parents[1] / "frontend" / "demo_model"
_SECONDS = 220.0
_GRACE = 10.0  # seconds, for what has begun in time
_PROMPTS = "1,17,70,600"  # tokens of the sequences that each case computes together; the last has 3 blocks of KV
_FAILURES = (ModelError, RuntimeError, MemoryError, OSError)
_MOST_TOKENS = 768  # of all prompts
_TOKENS = 6  # of each answer
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": [(3, 2.0)]},
    {"temperature": 0.9, "bad_words_token_ids": [[5]]},
)
"""Parameters of sequences in turn; the last ones are constrained too."""
_OTHER_CHUNK = 7

FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "f32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}

_SPEED_SHAPE, _SPEED_LAYERS = "qwen3-0.6b", 8
_LARGE_SHAPE, _LARGE_LAYERS = "qwen3-8b", 4
_WORKS = (1, 128), (8, 64)  # sequences, and tokens of the prompt of each
_LARGE_WORKS = (1, 2048), (64, 30)
_LARGE: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
"""Fields of Qwen3-8B that the speed's shape has others of."""
_PEER_SECONDS = 30.0  # of an import of torch from a slow disk, and its measurement

_COPIED_BYTES, _COPIES = 1 << 28, 10
_FIXED = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 0, "dtype": "bfloat16"}
_SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {**_SMALL},
    "qwen3-30b-a3b": {**_SMALL, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2},
    "qwen3.5-0.8b": {
        **_SMALL, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
    },
    "lfm2-1.2b": {
        **_SMALL, "block_ff_dim": 256,
        "block_auto_adjust_ff_dim": False, "block_multiple_of": 32, "full_attn_idxs": [1],
    },
    "gemma-3n-e2b": {
        **_SMALL, "num_hidden_layers": 10, "sliding_window": 48, "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 512, "laurel_rank": 16,
    },
    "gemma-4-e2b": {
        **_SMALL, "num_hidden_layers": 10, "num_key_value_heads": 1, "global_head_dim": 64, "sliding_window": 48,
        "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 512,
    },
}  # fmt: skip
"""Random models: fields that replace those of a shape of make_checkpoint.py."""


@dataclass(frozen=True)
class Case:
    """A comparison of a model on both devices, or with fast_matmul in other chunks."""

    name: str
    model: Path
    formats: dict[str, Any] = field(default_factory=dict)
    chunk: int = 512
    works: tuple[tuple[int, int], ...] = _WORKS

    def other(self, device: str) -> tuple[Case, str, str]:
        """Return the case whose answers are the same, its device, and what it is called."""
        if "fast_matmul" in self.formats:
            return replace(self, chunk=_OTHER_CHUNK), device, f"those in chunks of {_OTHER_CHUNK}"
        return self, "cpu", "the CPU's"

    def options(self, device: str) -> LoadOptions:
        """Return the options of its model on a device."""
        return LoadOptions(
            str(self.model), num_pages=32, max_num_batched_tokens=self.chunk, device=device, max_model_len=1024,
            **self.formats,
        )  # fmt: skip


def answers(
    engine: ModelRunner, chunk: int, prompts: list[int]
) -> tuple[list[tuple[list[int], list[float]]], list[int]]:
    """Return the tokens and log probabilities of sequences that are computed together, and what the host and a fork get
    of the pages of the last one."""
    sequences = engine.sequences
    slots: list[int] = []
    done: list[int] = []
    found: list[tuple[list[int], list[float]]] = []
    for index, length in enumerate(prompts):
        prompt = np.random.default_rng(length).integers(0, engine.vocab_size, length).tolist()
        kind = index % len(_SAMPLING)
        sampling = SamplingConfig(seed=index, logprobs=3, **_SAMPLING[kind])
        constraint = every_third_token(engine.vocab_size) if kind == len(_SAMPLING) - 1 else None
        slots.append(sequences.open(prompt, length, sampling=sampling, constraint=constraint))
        sequences.reserve(slots[-1], length + _TOKENS)
        done.append(0)
        found.append(([], []))
    while open_rows := [row for row in range(len(slots)) if len(found[row][0]) < _TOKENS]:
        left, rows, counts = chunk, [], []
        for row in open_rows:
            count = min(left, prompts[row] + len(found[row][0]) - done[row])
            if count > 0:
                rows.append(row)
                counts.append(count)
                left -= count
        result = engine.run(StepInput([slots[row] for row in rows], [done[row] for row in rows], counts))
        while engine.collect_pending(result):
            pass
        for place, row in enumerate(rows):
            done[row] += counts[place]
            if result.token_ids[place]:
                found[row][0].extend(result.token_ids[place])
                found[row][1].extend(value for entry in result.logprobs(place) or [] for value in entry[1])
    for slot in slots[:-1]:
        sequences.close(slot)
    copied = copies(engine, slots[-1], done[-1])
    sequences.close(slots[-1])
    return found, copied


def every_third_token(vocab_size: int) -> TokenMask:
    """Return a constraint that allows these tokens."""
    mask = TokenMask(vocab_size)
    mask.allow(list(range(0, vocab_size, 3)))
    mask.publish()
    return mask


def copies(engine: ModelRunner, slot: int, num_tokens: int) -> list[int]:
    """Return the checksums of the full pages of a sequence of so many tokens as they are copied to the host, of one
    that is copied into another page and back, and the token that a fork samples. Raises RuntimeError if a page changes.
    """
    sequences, copy, size = engine.sequences, np.empty(engine.page_bytes, np.uint8), engine.block_size
    found = [engine.copy_page(page, copy) for page in sequences.pages(slot)[: num_tokens // size]]
    if found:
        other = sequences.open([1] * size, size, cache_salt="filled")
        sequences.reserve(other, size)
        (page,) = sequences.pages(other)
        content, before = engine.fill_page(page, copy), copy.copy()
        if content != found[-1] or engine.copy_page(page, copy) != content or not np.array_equal(copy, before):
            raise RuntimeError("a page that was copied to the host and back is not the same")
        sequences.close(other)
    greedy, tokens = SamplingConfig(temperature=0.0), sequences.tokens(slot)[:num_tokens]
    fork = sequences.open(tokens, num_tokens, sampling=greedy)
    if engine.sequences.states is None and engine.fork(fork, slot, num_tokens - 1, num_tokens + 1):
        found += engine.run(StepInput([fork], [num_tokens - 1], [1])).token_ids[0]
    sequences.close(fork)
    return found


def difference(case: Case, device: str, prompts: list[int]) -> str | None:
    """Return what differs on a device; None if nothing does."""
    other_case, other_device, whose = case.other(device)
    compared = (case, device), (other_case, other_device)
    (ours, copied), (theirs, others) = (
        answers(load_model(each.options(name)), each.chunk, prompts) for each, name in compared
    )
    if copied != others:
        return f"copies of pages, or a fork: {copied}, and {whose} are {others}"
    for length, mine, other in zip(prompts, ours, theirs, strict=True):
        if mine[0] != other[0]:
            return f"after a prompt of {length} tokens: tokens {mine[0]}, and {whose} are {other[0]}"
        if mine[1] != other[1]:
            count = sum(a != b for a, b in zip(mine[1], other[1], strict=True))
            return f"after a prompt of {length} tokens: {count} of {len(mine[1])} log probabilities"
    return None


def family_config(shape: str) -> dict[str, Any]:
    """Return the config.json of a small random model."""
    config = {**_FIXED, **SHAPES[shape], "vocab_size": 512, "num_hidden_layers": 2, **FAMILIES[shape]}
    own = {**SHAPES[shape], **FAMILIES[shape]}
    return config | chosen_layers(own, config["num_hidden_layers"])


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write a checkpoint of random weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, config, 0)
    return folder


def cases(folder: Path) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield the names of what is compared, each with a function that makes its case."""
    for name, formats in FORMATS.items():
        yield f"demo {name}", partial(Case, f"demo {name}", DEMO_MODEL, formats)
    fast = FORMATS["bf16"] | {"fast_matmul": True}
    yield "demo fast_matmul", partial(Case, "demo fast_matmul", DEMO_MODEL, fast)
    yield "demo bf16 in chunks", partial(Case, "demo bf16 in chunks", DEMO_MODEL, FORMATS["bf16"], 7)
    for shape in FAMILIES:
        yield shape, partial(_family_case, folder, shape)


def _family_case(folder: Path, shape: str) -> Case:
    return Case(shape, write_model(folder / shape, family_config(shape)))


def speed_cases(folder: Path) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield the names of what is measured, likewise."""
    for name, formats in FORMATS.items():
        yield f"demo {name}", partial(Case, f"demo {name}", DEMO_MODEL, formats, 2048)
    for shape, layers, changes, works in (
        (_SPEED_SHAPE, _SPEED_LAYERS, {}, _WORKS),
        (_LARGE_SHAPE, _LARGE_LAYERS, _LARGE, _LARGE_WORKS),
    ):
        model = cache(partial(write_model, folder / shape, speed_config(layers, changes)))
        for name, formats in FORMATS.items():
            if name != "f32":
                yield (title := _speed_title(shape, layers, name)), partial(_made, title, model, formats, works)


def speed_config(layers: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model that is measured, with some fields of its own."""
    return {**_FIXED, **SHAPES[_SPEED_SHAPE], "vocab_size": 32000, **changes, "num_hidden_layers": layers}


def _speed_title(shape: str, layers: int, name: str) -> str:
    return f"{layers} layers of {shape} {name}"


def _made(name: str, model: Callable[[], Path], formats: dict[str, Any], works: tuple[tuple[int, int], ...]) -> Case:
    return Case(name, model(), formats, 2048, works)


def copy_rate(device: str) -> float:
    """Return the bytes per second that a GPU reads and writes when it copies its memory. Raises OSError."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, context, places = ctypes.c_int(), ctypes.c_void_p(), [ctypes.c_uint64() for _ in range(2)]

    def call(name: str, *arguments: Any) -> None:
        if status := getattr(driver, name)(*arguments):
            raise OSError(f"{name} returned {status}")

    def copy(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            call("cuMemcpyAsync", *reversed(places), ctypes.c_size_t(_COPIED_BYTES), None)
        call("cuCtxSynchronize")
        return time.perf_counter() - begun

    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(handle), int(device.partition(":")[2] or 0))
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    call("cuCtxSetCurrent", context)
    try:
        for place in places:
            call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(_COPIED_BYTES))
        copy(1)
        return 2 * _COPIED_BYTES * _COPIES / copy(_COPIES)
    finally:
        for place in places:
            if place.value:
                call("cuMemFree_v2", place)
        call("cuDevicePrimaryCtxRelease_v2", handle)


def step_seconds(engine: ModelRunner, sequences: int, length: int, steps: int) -> tuple[float, float]:
    """Return the seconds of a step with prompts of so many tokens, and the least of the steps that decode after it."""
    vocab, rng = engine.vocab_size, np.random.default_rng(0)
    slots = []
    for _ in range(sequences):
        prompt = rng.integers(0, vocab, length).tolist()
        slots.append(engine.sequences.open(prompt, length, sampling=SamplingConfig(temperature=0.0)))
        engine.sequences.reserve(slots[-1], length + steps + 2)
    times = []
    starts, counts = [0] * sequences, [length] * sequences
    for _ in range(steps + 1):
        begun = time.perf_counter()
        engine.run(StepInput(slots, starts, counts))
        times.append(time.perf_counter() - begun)
        starts, counts = [start + count for start, count in zip(starts, counts, strict=True)], [1] * sequences
    for slot in slots:
        engine.sequences.close(slot)
    return times[0], min(times[1:])


def measure(case: Case, device: str, steps: int) -> list[WorkSpeed]:
    """Print and return the speed of a model for each work."""
    begun = time.perf_counter()
    longest = max(length for _, length in case.works) + steps + 2
    engine = load_model(replace(case.options(device), num_pages=256, max_model_len=max(1024, longest)))
    size = engine.memory.weights
    print(f"speed  {case.name:28} loaded in {time.perf_counter() - begun:.1f} s, {size / 1e6:,.0f} MB of weights")
    speeds = []
    for sequences, length in case.works:
        step_seconds(engine, sequences, length, 1)  # loads kernels
        speeds.append(WorkSpeed(sequences, length, *step_seconds(engine, sequences, length, steps), size))
        print(f"speed  {case.name:28} {speeds[-1]}", flush=True)
    return speeds


def lengths(text: str) -> list[int]:
    """Return the tokens of prompts, which all fit into the KV pages of a case. Raises ValueError."""
    found = [int(length) for length in text.split(",")]
    if min(found) < 1 or sum(found) > _MOST_TOKENS:
        raise ValueError
    return found


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", help="the GPU (default cuda:0)")
    parser.add_argument(
        "--seconds", type=float, default=_SECONDS, help=f"most time that this takes (default {_SECONDS:g})"
    )
    parser.add_argument("--only", default="", metavar="TEXTS", help="cases whose names contain one of these texts")
    parser.add_argument(
        "--prompts", type=lengths, default=_PROMPTS, metavar="LENGTHS", help=f"tokens of prompts (default {_PROMPTS})"
    )
    parser.add_argument("--no-speed", action="store_true", help="measure nothing")
    parser.add_argument("--steps", type=int, default=8, help="decode steps that are timed (default 8)")
    parser.add_argument("--begun", type=float, default=time.monotonic(), help=argparse.SUPPRESS)
    parser.add_argument("--reports", type=int, help=argparse.SUPPRESS)  # of the process that computes: a pipe
    return parser.parse_args()


class Check:
    """Comparisons and measurements of one device, within a time limit, each of which is reported to `reports`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._device: str = arguments.device
        self._steps: int = arguments.steps
        self._prompts: list[int] = arguments.prompts
        self._only = [text for text in arguments.only.split(",") if text]
        self._end: float = arguments.begun + arguments.seconds
        self._reports: int = arguments.reports
        self._longest = 0.0
        self._speeds: dict[str, list[WorkSpeed]] = {}

    def compare(self, name: str, make: Callable[[], Case]) -> None:
        """Compare a case with the CPU, if it is wanted and there is time."""
        with self._timed("bits", name) as is_wanted:
            if not is_wanted:
                return
            begun = time.perf_counter()
            try:
                found = difference(make(), self._device, self._prompts)
            except _FAILURES as error:
                found = _failure(error)
            print(f"bits   {name:28} {found or 'equal'} ({time.perf_counter() - begun:.1f} s)", flush=True)
            self._report("differs" if found else "equal", name)

    def measure(self, name: str, make: Callable[[], Case]) -> None:
        """Measure a case, likewise."""
        with self._timed("speed", name) as is_wanted:
            if not is_wanted:
                return
            try:
                self._speeds[name] = measure(make(), self._device, self._steps)
            except _FAILURES as error:
                print(f"speed  {name:28} {_failure(error)}", flush=True)
                self._report("differs", name)

    @contextmanager
    def _timed(self, what: str, name: str, least: float = 0.0) -> Iterator[bool]:
        """Give whether a case is wanted and there is time for it: that of the longest one yet, and at least so much."""
        begun = time.monotonic()
        is_wanted = not self._only or any(text in name for text in self._only)
        if is_wanted and begun + max(self._longest, least) > self._end:
            print(f"{what:6} {name:28} left out: no time is left", flush=True)
            is_wanted = False
        if is_wanted:
            self._report("begins", f"{what} of {name}")
        yield is_wanted
        self._longest = max(self._longest, time.monotonic() - begun)

    def measure_copies(self) -> None:
        """Measure copies, which are the limit of what reads weights."""
        with self._timed("speed", "copy") as is_wanted:
            if not is_wanted:
                return
            try:
                print(f"speed  {'copy':28} reads and writes {copy_rate(self._device) / 1e9:,.0f} GB/s", flush=True)
            except OSError as error:
                print(f"speed  {'copy':28} {_failure(error)}", flush=True)

    def measure_peers(self) -> None:
        """Measure torch's int8 GEMMs and a model of transformers, of the largest model that is measured."""
        config, device = speed_config(_LARGE_LAYERS, _LARGE), self._device
        ours = {name: self._speeds.get(_speed_title(_LARGE_SHAPE, _LARGE_LAYERS, name), []) for name in FORMATS}
        _, rows = _LARGE_WORKS[0]
        prefill = next(iter(ours["int8"]), None)
        name = f"torch._int_mm {_LARGE_SHAPE} int8"
        self._measure_peer(name, partial(compare_gemms, name, config, rows, device, prefill))
        name = f"transformers {_LARGE_SHAPE} bf16"
        self._measure_peer(name, partial(compare_model, name, config, _LARGE_WORKS, device, self._steps, ours["bf16"]))

    def _measure_peer(self, name: str, compare: Callable[[], None]) -> None:
        with self._timed("speed", name, _PEER_SECONDS) as is_wanted:
            if not is_wanted:
                return
            try:
                compare()
            except PeerError as error:
                print(f"speed  {name:28} left out: {error}", flush=True)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is no failure of Quire
                print(f"speed  {name:28} {_failure(error)}", flush=True)

    def _report(self, event: str, name: str) -> None:
        os.write(self._reports, f"{event} {name}\n".encode())


def _failure(error: Exception) -> str:
    return f"failed: {str(error) or type(error).__name__}"


def compute(arguments: argparse.Namespace) -> None:
    """Compare and measure all cases, in the process that computes."""
    check = Check(arguments)
    with tempfile.TemporaryDirectory(prefix="quire-check-") as folder:
        for name, make in cases(Path(folder)):
            check.compare(name, make)
        if arguments.no_speed:
            return
        check.measure_copies()
        for name, make in speed_cases(Path(folder)):
            check.measure(name, make)
        check.measure_peers()


@dataclass
class Summary:
    """Results that the process that computes has reported, and the reason for its end if that was too early."""

    num_equal: int = 0
    num_others: int = 0
    current: str = "its start"
    end: str = ""

    def add(self, report: str) -> None:
        """Add a line of a report."""
        event, _, name = report.partition(" ")
        self.num_equal += event == "equal"
        self.num_others += event == "differs"
        self.current = name if event == "begins" else self.current

    def __str__(self) -> str:
        count = self.num_equal + self.num_others
        if self.num_others:
            found = f"{self.num_others} of {count} cases differ or failed"
        else:
            found = f"all {count} cases that were compared are equal" if count else "nothing was compared"
        return f"{found}; {self.end} in {self.current}" if self.end else found


def follow(command: list[str], end: float) -> Summary:
    """Run a process that computes, until a time, and return what it has reported."""
    summary, (reports, target) = Summary(), os.pipe()
    process = subprocess.Popen([*command, "--reports", str(target)], pass_fds=[target], start_new_session=True)
    os.close(target)
    left = b""
    try:
        while select.select([reports], [], [], max(0.0, end - time.monotonic()))[0]:
            if not (more := os.read(reports, 4096)):
                if status := process.wait():
                    summary.end = f"the process ended with status {status}"
                return summary
            *lines, left = (left + more).split(b"\n")
            for line in lines:
                summary.add(line.decode())
        summary.end = "time ran out"
    except KeyboardInterrupt:
        summary.end = "interrupted"
    finally:
        os.close(reports)
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)  # not waited for: a GPU that hangs may keep it
    return summary


def main() -> int:
    """Print what was found; return the exit status."""
    arguments = parse_arguments()
    if arguments.reports is not None:
        compute(arguments)
        return 0
    try:
        gpus, problem = _native.CudaDevice.names(), "this machine has none"
    except RuntimeError as error:
        gpus, problem = [], str(error)
    if not gpus:
        print(f"there is no GPU to check: {problem}")
        return 2
    print(f"GPUs   {', '.join(gpus)}", flush=True)
    command = [sys.executable, __file__, *sys.argv[1:], "--begun", str(arguments.begun)]
    summary = follow(command, arguments.begun + max(arguments.seconds, 0.0) + _GRACE)
    print(summary)
    return 0 if summary.num_equal and not summary.num_others and not summary.end else 1


if __name__ == "__main__":
    sys.exit(main())
