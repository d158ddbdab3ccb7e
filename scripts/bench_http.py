"""Cost and robustness of the HTTP server: `.venv/bin/python scripts/bench_http.py --help`.

`streams`: many concurrent streams. The report has the inter-token latency over all streams, the longest gap of any, and
the CPU time a token of the server's process and of the engine's.

`stalled`: the same, in turns without and with clients that read nothing.

`dropped`: connections are opened and dropped in mid-stream; the report has what is left of them.

The clients run in this process and share the machine with the server; they count events without decoding them.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import shlex
import statistics
import time

import uvloop
from bench.builds import header, quire_build
from bench.http_streams import StreamClient, StreamTimes, open_stream
from bench.running_server import RunningServer, serving

from quire.frontend import LLM

_IDLE_SECONDS = 30.0


def body_of(seed: int, tokens: int, chat: bool) -> dict[str, object]:
    """Return a request for exactly `tokens` tokens."""
    generator = random.Random(seed)
    words = " ".join(generator.choice(["king", "fox", "well", "daughter", "wolf", "gold"]) for _ in range(20))
    common: dict[str, object] = {"max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": seed}
    return common | ({"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words})


async def run_streams(server: RunningServer, count: int, tokens: int, chat: bool, seed: int = 0) -> list[StreamTimes]:
    """Run `count` concurrent streams to their end."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    clients = [await open_stream(server.url + path, body_of(seed + i, tokens, chat)) for i in range(count)]
    await asyncio.gather(*(client.ended for client in clients))
    return [client.result for client in clients]


def quantile(values: list[float], share: float) -> float:
    """Return the quantile of the values at this share."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def streams(server: RunningServer, args: argparse.Namespace) -> None:
    """Print the inter-token latency of many streams, and their CPU time."""
    await run_streams(server, args.streams, 16, args.chat, seed=1 << 20)  # KV pages are touched for the first time
    ratios = []
    for repetition in range(args.repetitions):
        before, began = server.cpu_seconds(), time.perf_counter()
        results = await run_streams(server, args.streams, args.tokens, args.chat, seed=repetition * args.streams)
        seconds = time.perf_counter() - began
        server_cpu, engine_cpu = (after - first for after, first in zip(server.cpu_seconds(), before, strict=True))
        failed = sum(not result.done or result.status != 200 for result in results)
        # The first gap of a stream lasts from its own first token to the step in which all other streams began.
        gaps = [gap for result in results if result.done for gap in result.token_latencies(args.tokens)]
        median, p99 = statistics.median(gaps), quantile(gaps, 0.99)
        total = args.streams * args.tokens
        ratios.append(p99 / median if median else math.inf)
        print(
            f"{args.streams} streams, {failed} failed: {total / seconds:.0f} tokens/s; inter-token latency median "
            f"{1e3 * median:.1f} ms, p99 {1e3 * p99:.1f} ms, ratio {ratios[-1]:.2f}, longest {1e3 * max(gaps):.0f} "
            f"ms, {gaps.count(0) / len(gaps):.1%} of the tokens together with the one before; "
            f"server {1e6 * server_cpu / total:.0f} us CPU a token, engine {1e6 * engine_cpu / total:.0f} us"
        )
    print(f"p99 / median: median of {args.repetitions} is {statistics.median(ratios):.2f}")


async def stalled(server: RunningServer, args: argparse.Namespace) -> None:
    """Print the inter-token latency of streams, without and with clients that read nothing."""
    await run_streams(server, args.streams, 16, args.chat, seed=1 << 20)
    medians: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(args.repetitions):
        for with_stalled in (False, True):
            stalled_clients: list[StreamClient] = []
            if with_stalled:
                path = server.url + "/v1/completions"
                stalled_clients = [
                    await open_stream(path, body_of(i, 1500, False), reads=False) for i in range(args.stalled)
                ]
                await _idle(server)  # they have received all that fits their buffers
            results = await run_streams(server, args.streams, args.tokens, args.chat)
            medians[with_stalled].append(
                statistics.median(gap for result in results for gap in result.token_latencies(args.tokens))
            )
            for client in stalled_clients:
                client.close()
            await _idle(server)
    before, after = (statistics.median(medians[key]) for key in (False, True))
    print(
        f"{args.streams} streams, median inter-token latency: {1e3 * before:.2f} ms; with {args.stalled} clients that "
        f"read nothing {1e3 * after:.2f} ms, ratio {after / before:.3f}; server {server.resident_mib():.0f} MiB"
    )


async def dropped(server: RunningServer, args: argparse.Namespace) -> None:
    """Print what remains of connections that are dropped in mid-stream."""
    await run_streams(server, 8, 16, args.chat)
    await _idle(server)
    files, memory = server.open_files(), server.resident_mib()
    opened, refused = 0, 0
    while opened < args.connections:
        path = server.url + "/v1/completions"
        clients = [await open_stream(path, body_of(opened + i, 1500, False)) for i in range(args.streams)]
        opened += len(clients)
        await asyncio.gather(*(client.began for client in clients))
        for client in clients:
            refused += client.result.status != 200
            client.close()
    began = time.perf_counter()
    stats = await _idle(server)
    left = await asyncio.to_thread(_files_left, server, files)
    print(
        f"{opened} connections dropped ({refused} had been refused): {left} file descriptors left, "
        f"{stats['pages_held']} pages held, memory {memory:.0f} -> {server.resident_mib():.0f} MiB, "
        f"idle after {time.perf_counter() - began:.2f} s"
    )


def _files_left(server: RunningServer, before: int) -> int:
    """Return the number of new file descriptors, once it is 0 or after a timeout."""
    deadline = time.monotonic() + _IDLE_SECONDS
    while (left := server.open_files() - before) > 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


async def _idle(server: RunningServer) -> dict[str, int]:
    """Wait until the engine is idle; return its statistics."""

    def wait() -> dict[str, int]:
        with LLM(engine_address=server.engine_address) as llm:
            deadline = time.monotonic() + _IDLE_SECONDS
            while (stats := llm.stats())["running"] + stats["waiting"] and time.monotonic() < deadline:
                time.sleep(0.02)
            return stats

    return await asyncio.to_thread(wait)


def main() -> None:
    """Parse arguments and run one benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("streams", "stalled", "dropped"))
    parser.add_argument("--streams", type=int, default=256, help="concurrent streams")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each answer")
    parser.add_argument("--stalled", type=int, default=16, help="clients that read nothing")
    parser.add_argument("--connections", type=int, default=1000, help="dropped connections, --streams at a time")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--chat", action="store_true", help="chats instead of completions")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="the following flags go to `quire serve`")
    args = parser.parse_args()
    print("\n".join(header([quire_build(shlex.join(["quire", "serve", *args.serve]))])))
    what = {"streams": streams, "stalled": stalled, "dropped": dropped}[args.what]
    with serving(args.serve) as server:
        uvloop.run(what(server, args))


if __name__ == "__main__":
    main()
