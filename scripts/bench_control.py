"""Cost of the control plane: `.venv/bin/python scripts/bench_control.py --help`.

A real engine process whose model answers at once, or after `--step-seconds`, serves 256 concurrent requests of
`AsyncLLM`: only the scheduler, both sockets and the Python client take time. The report has tokens a minute, the time
of each part, and, with `--requests`, the growth of both processes' memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import uvloop

from quire.frontend import AsyncLLM, SamplingParams

SCRIPTS = Path(__file__).parent
SAMPLES = 5


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Counts:
    """Requests sent and tokens received so far."""

    def __init__(self) -> None:
        self.requests = self.tokens = 0


async def client(llm: AsyncLLM, counts: Counts, arguments: argparse.Namespace, number: int, until: float) -> None:
    """Send one request after the other."""
    params = SamplingParams(max_tokens=arguments.output, ignore_eos=True, detokenize=False)
    while time.perf_counter() < until and (not arguments.requests or counts.requests < arguments.requests):
        counts.requests += 1
        prompt = [(number * 31 + counts.requests * 7 + i) % 30_000 for i in range(arguments.prompt)]
        async for output in llm.generate({"prompt_token_ids": prompt}, params, output_kind="delta"):
            counts.tokens += len(output.outputs[0].token_ids)


async def run(llm: AsyncLLM, engine: int, arguments: argparse.Namespace) -> None:
    """Run all clients, and print the memory at intervals."""
    counts = Counts()
    begin = time.perf_counter()
    until = begin + (1e9 if arguments.requests else arguments.seconds)
    clients = [
        asyncio.create_task(client(llm, counts, arguments, number, until)) for number in range(arguments.concurrency)
    ]
    all_clients = asyncio.gather(*clients)
    sample = 1
    while not all_clients.done():
        await asyncio.sleep(0.2)
        if arguments.requests and counts.requests >= sample * arguments.requests / SAMPLES:
            print(
                f"{counts.requests:8} requests: engine {resident_mib(engine):7.1f} MiB, "
                f"client {resident_mib(os.getpid()):7.1f} MiB"
            )
            sample += 1
    await all_clients
    seconds = time.perf_counter() - begin
    print(
        f"{counts.tokens} tokens of {counts.requests} requests in {seconds:.1f} s: "
        f"{counts.tokens * 60 / seconds / 1e6:.2f} M tokens a minute, {counts.requests / seconds:.0f} requests/s"
    )
    stats = await llm.stats()
    print(f"steps {stats['step']}, {counts.tokens / max(1, stats['step']):.0f} tokens a step")


def main() -> None:
    """Start the engine, run the clients, print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=256, metavar="N", help="concurrent requests")
    parser.add_argument("--prompt", type=int, default=100, metavar="TOKENS")
    parser.add_argument("--output", type=int, default=500, metavar="TOKENS")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S")
    parser.add_argument(
        "--requests", type=int, default=0, metavar="N", help="run N requests instead, and print the memory"
    )
    parser.add_argument("--pages", type=int, default=20_000, metavar="N", help="KV pages of 32 tokens")
    parser.add_argument("--step-seconds", type=float, default=0.0, metavar="S", help="duration of the model's step")
    arguments = parser.parse_args()
    numbers = [str(arguments.pages), str(arguments.step_seconds)]
    command = [sys.executable, "-m", "bench.instant_process", *numbers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=SCRIPTS) as engine:
        assert engine.stdout is not None
        address = engine.stdout.readline().split()[1]
        llm = AsyncLLM(engine_address=address, skip_tokenizer_init=True)
        try:
            uvloop.run(run(llm, engine.pid, arguments))
            cpu = {
                thread.name: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
                for thread in threading.enumerate()
                if thread.ident
            }
        finally:
            llm.close()
            engine.send_signal(signal.SIGTERM)
        report = json.loads(engine.stdout.readline())
    steps = max(1, report["steps"])
    print(f"microseconds a step, of {steps} steps")
    for name, seconds in report["seconds"].items():
        print(f"    engine: {name:22} {1e6 * seconds / steps:9.1f} (wall)")
    for name, seconds in report["cpu"].items():
        print(f"    engine: thread {name:15} {1e6 * seconds / steps:9.1f} (CPU)")
    for name, seconds in cpu.items():
        print(f"    client: thread {name:15} {1e6 * seconds / steps:9.1f} (CPU)")
    print(f"KV pages held at the end: {report['held']}")


if __name__ == "__main__":
    main()
