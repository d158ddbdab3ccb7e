"""Inter-token latency beside long prompts, with one engine and with two: `.venv/bin/python ... --help`.

Some streams decode. Meanwhile long prompts arrive, one after the other. They are computed by the same engine, with one
thread or one for each CPU; or by a prefill engine, from which the decode engine fetches their KV. Each engine of a pair
has one thread, on a CPU of its own, so that the pair takes as much of the machine as one engine with two threads.

Everything goes through `AsyncLLM`, the sockets and the engine processes. The model is the demo model with a longer
context, unless another one is given.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_load import RandomLoad, TimedStream, long_demo, quantile

from quire.frontend import AsyncLLM
from quire.protocol.address import default_address

_PROMPT_TOKENS = 30  # of a stream
_WARM_TOKENS = 1024  # of a prompt from which the engines learn their speed


@dataclass(frozen=True)
class Arm:
    """A way to use two CPUs."""

    name: str
    cpus: tuple[int, ...]  # CPUs of the engine that decodes
    prefill_cpus: tuple[int, ...] = ()  # CPUs of another engine, which prefills; empty: there is none
    has_prompts: bool = True


@contextlib.contextmanager
def engine(arguments: argparse.Namespace, model: Path, cpus: Sequence[int], *flags: str) -> Iterator[str]:
    """Run an engine with a thread on each of these CPUs; yield its address."""
    address, own = default_address(), os.sched_getaffinity(0)
    command = [sys.executable, "-P", "-m", "quire.engine_core", "--model", str(model), "--engine-address", address]
    os.sched_setaffinity(0, cpus)  # the child inherits it
    try:
        process = subprocess.Popen(
            [*command, "--threads", str(len(cpus)), "--max-model-len", str(arguments.long_tokens + 1024), *flags],
            stdout=subprocess.PIPE,
        )
    finally:
        os.sched_setaffinity(0, own)
    assert process.stdout is not None
    try:
        if not process.stdout.readline().startswith(b"READY"):
            raise SystemExit("an engine did not start")
        yield address
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def client(arguments: argparse.Namespace, model: Path, arm: Arm) -> Iterator[AsyncLLM]:
    """Run the engines of an arm; yield a client."""
    with contextlib.ExitStack() as stack:
        prefill = stack.enter_context(engine(arguments, model, arm.prefill_cpus)) if arm.prefill_cpus else None
        flags = () if prefill is None else ("--kv-peer", prefill)
        address = stack.enter_context(engine(arguments, model, arm.cpus, *flags))
        llm = AsyncLLM(
            engine_address=address,
            prefill_address=() if prefill is None else (prefill,),
            prefill_min_tokens=_PROMPT_TOKENS + 1,
            skip_tokenizer_init=True,
        )
        stack.callback(llm.close)
        yield llm


async def measure(llm: AsyncLLM, arguments: argparse.Namespace, arm: Arm) -> str:
    """Run streams and long prompts for the time of an arm; return its row of the report."""
    load = RandomLoad(llm, arguments.seed)
    await asyncio.gather(load.run(_WARM_TOKENS, 8), load.run(_PROMPT_TOKENS, 64))
    streams: list[TimedStream] = []
    longs: list[TimedStream] = []
    is_done = asyncio.Event()

    async def stream() -> None:
        while True:
            await load.run(_PROMPT_TOKENS, arguments.stream_tokens, streams)

    async def prompts() -> None:
        while arm.has_prompts:
            longs.append(await load.run(arguments.long_tokens, 2))
            is_done.set()

    tasks = [asyncio.create_task(stream()) for _ in range(arguments.streams)]
    await asyncio.sleep(1.0)
    begin = time.perf_counter()
    tasks.append(asyncio.create_task(prompts()))
    await asyncio.sleep(arguments.seconds)
    if arm.has_prompts:
        await is_done.wait()
    end = time.perf_counter()
    stats = await llm.stats()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    gaps = [gap for each in streams for gap in each.gaps(begin, end)]
    tokens = len(gaps) / (end - begin)
    row = f"{arm.name:<26} {1e3 * quantile(gaps, 0.5):8.1f} {1e3 * quantile(gaps, 0.99):8.1f} {1e3 * max(gaps):8.1f}"
    row += f" {tokens:8.1f} {len(longs):8d} {quantile([each.first for each in longs], 0.5):8.1f}"
    return row + f" {stats.get('kv_peer_pages_fetched', 0):8d}"


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint; default: the demo model with a longer context")
    parser.add_argument("--long-tokens", type=int, default=8000, help="tokens of a long prompt")
    parser.add_argument("--streams", type=int, default=4, help="streams that decode")
    parser.add_argument("--stream-tokens", type=int, default=200, help="tokens of each answer of a stream")
    parser.add_argument("--seconds", type=float, default=60.0, help="time of each arm, or until a long prompt is done")
    parser.add_argument("--cpus", type=int, nargs=2, default=[0, 1], help="the two CPUs")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Measure all arms in turn, and print a row for each."""
    arguments = parse()
    first, second = arguments.cpus
    arms = [
        Arm("1 engine, no prompts", (second,), has_prompts=False),
        Arm("1 engine, 1 thread", (second,)),
        Arm("1 engine, 2 threads", (first, second)),
        Arm("2 engines, 1 thread each", (second,), (first,)),
    ]
    print(f"{'':<26} {'ITL p50':>8} {'p99':>8} {'max':>8} {'tokens/s':>8} {'prompts':>8} {'TTFT':>8} {'fetched':>8}")
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or long_demo(Path(folder))
        for arm in arms:
            with client(arguments, model, arm) as llm:
                print(asyncio.run(measure(llm, arguments, arm)), flush=True)
    print("ITL in ms, of the streams; prompts: long ones that were done; TTFT: their median in s; fetched: KV pages")


if __name__ == "__main__":
    main()
