"""Cost and benefit of threads: `.venv/bin/python scripts/bench_threads.py --help`.

First the cost of a launch: of the pool alone, and in a plan of a thousand launches whose kernels do nothing. Then the
tokens per second of whole engines with each number of threads, unpinned and pinned: streams through the socket that all
start at once. The engines run concurrently and take turns, since the load of a shared machine changes by the second;
compare the best and the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import itertools
import multiprocessing
import statistics
import time

from quire.frontend import AsyncLLM, SamplingParams
from quire.kernels import _native

LAUNCHES = 1000


def _burn() -> None:
    while True:
        pass


def launch_costs(threads: int) -> tuple[float, float]:
    """Return the seconds of a launch of the pool and of a plan, the least of several."""
    pool = _native.ThreadPool(threads)
    nothing = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value  # a C function that ignores its arguments
    assert nothing is not None
    device, plan = _native.CpuDevice(pool), _native.Plan()
    for _ in range(LAUNCHES):
        plan.add(nothing, [], "tokens")

    def seconds() -> float:
        began = time.perf_counter()
        device.run(plan, {"tokens": 8 * threads})
        return (time.perf_counter() - began) / LAUNCHES

    return min(pool.launch_time(LAUNCHES) for _ in range(20)), min(seconds() for _ in range(20))


async def stream(llm: AsyncLLM, first: int, tokens: int) -> None:
    """Run one request to its end."""
    prompt = [(first + 7 * i) % 400 + 10 for i in range(16)]
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    async for _ in llm.generate(prompt, params, output_kind="delta"):
        pass


async def measure(engines: dict[str, AsyncLLM], streams: list[int], tokens: int, rounds: int) -> None:
    """Print the tokens per second of each engine, for each number of streams."""
    for llm in engines.values():
        await stream(llm, 0, tokens)
    for count in streams:
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for _, (name, llm) in itertools.product(range(rounds), engines.items()):
            began = time.perf_counter()
            await asyncio.gather(*(stream(llm, first, tokens) for first in range(count)))
            rates[name].append(count * tokens / (time.perf_counter() - began))
        for name, found in rates.items():
            print(
                f"{count:3} streams, {name:20} best {max(found):8.1f} median {statistics.median(found):8.1f} tokens/s"
            )


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder; the demo model by default")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, _native.default_threads()], metavar="N")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each stream (default 100)")
    parser.add_argument("--rounds", type=int, default=10, help="(default 10)")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes that compete for the CPUs")
    arguments = parser.parse_args()
    threads = sorted(set(arguments.threads))
    for count in threads:
        pool, plan = launch_costs(count)
        print(f"{count} threads: a launch takes {pool * 1e6:.2f} us, one in a plan {plan * 1e6:.2f} us")
    engines = {
        f"{count} threads{', pinned' * pin}": AsyncLLM(
            arguments.model, max_model_len=512, num_pages=1024, threads=count, pin_threads=pin
        )
        for count, pin in itertools.product(threads, [False, True])
        if count > 1 or not pin  # a single thread is the caller, which is never pinned
    }
    competitors = [multiprocessing.Process(target=_burn, daemon=True) for _ in range(arguments.busy)]
    for competitor in competitors:
        competitor.start()
    asyncio.run(measure(engines, arguments.streams, arguments.tokens, arguments.rounds))
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    main()
