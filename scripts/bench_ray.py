"""Cost of Ray Serve around the engine: `.venv/bin/python scripts/bench_ray.py --help`. It needs the extra `ray`.

The same streams go in turns through `quire serve` and through the application of `quire.frontend.ray` with one replica,
on a Ray cluster that is started here, with gRPC between its processes. The report has the time to the first token and
the tokens a second of each, and their ratios. Both are there all along, idle while the other has its turn.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

os.environ.setdefault("RAY_SERVE_USE_GRPC_BY_DEFAULT", "1")  # before Ray is imported, as `scripts/ray_serve` has it

import ray
from bench.builds import header, quire_build
from bench.http_streams import open_stream
from bench.running_server import serving
from ray import serve

from quire.frontend.ray.application import build

WORDS = "king fox well daughter wolf gold"


class Turn(NamedTuple):
    """A turn of a server: median seconds to the first token, and tokens a second of all streams together."""

    ttft: float
    rate: float


@contextmanager
def serving_by_ray(threads: int) -> Iterator[str]:
    """Start Ray and the application, and end both with the `with`; yield the address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    logging.getLogger("ray.serve").setLevel("WARNING")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build({"threads": threads, "log_level": "warning"}), name="quire", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


async def run_turn(url: str, args: argparse.Namespace, seed: int) -> Turn:
    """Run the streams of a turn to their end."""
    bodies: list[dict[str, object]] = [
        {
            "prompt": f"{seed + index} {WORDS}",
            "max_tokens": args.tokens,
            "ignore_eos": True,
            "stream": True,
            "seed": seed + index,
        }
        for index in range(args.streams)
    ]
    clients = await asyncio.gather(*(open_stream(f"{url}/v1/completions", body) for body in bodies))
    await asyncio.gather(*(client.ended for client in clients))
    results = [client.result for client in clients]
    if not all(result.done and result.status == 200 for result in results):
        raise SystemExit(f"streams of {url} have failed: {[result.status for result in results]}")
    begin, end = min(result.sent for result in results), max(result.times[-1] for result in results)
    ttft = statistics.median(result.times[0] - result.sent for result in results)
    return Turn(ttft, args.streams * args.tokens / (end - begin))


async def compare(urls: dict[str, str], args: argparse.Namespace) -> dict[str, list[Turn]]:
    """Let the servers take turns; return those of each, without a first one that warms up."""
    turns: dict[str, list[Turn]] = {name: [] for name in urls}
    for number in range(args.turns + 1):
        for name, url in urls.items():
            turn = await run_turn(url, args, number * args.streams)
            if number:
                turns[name].append(turn)
    return turns


def main() -> None:
    """Start both, and print what they take."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--streams", type=int, default=8, help="concurrent streams (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=400, help="of each stream (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="of each server (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each engine (default: %(default)s)")
    args = parser.parse_args()
    print(*header([quire_build(f"quire serve --threads {args.threads}", args.threads)]), sep="\n")
    flags = ["--threads", str(args.threads), "--log-level", "warning"]
    with serving(flags) as server, serving_by_ray(args.threads) as url:
        turns = asyncio.run(compare({"quire serve": server.url, "Ray Serve": url}, args))
    medians = []
    for name, each in turns.items():
        median = Turn(*map(statistics.median, zip(*each, strict=True)))
        medians.append(median)
        for label, turn in (*enumerate(each, 1), ("median", median)):
            print(f"{name:12} {label:>6}  TTFT {1e3 * turn.ttft:7.1f} ms, {turn.rate:7.1f} tokens/s")
    plain, through = medians
    ttft, rate = through.ttft / plain.ttft, through.rate / plain.rate
    print(f"Ray Serve against quire serve: TTFT x {ttft:.2f}, tokens/s x {rate:.2f}")


if __name__ == "__main__":
    main()
