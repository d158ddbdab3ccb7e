"""Cost of routing requests: `.venv/bin/python scripts/bench_routing.py --help`.

A decision is what a client waits for before it sends a request: the choice of an engine, with all that the router notes
of it. Prompts begin with one of 20 system prompts of 800 tokens, and a part of them goes on as an earlier one did. The
engines have reported as many different pages, in all, as the column says; bytes are what Python has allocated for them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import tracemalloc
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import quantiles

import msgspec

from quire.protocol.messages import PrefixReport
from quire.protocol.routing.routers import ROUTERS, RoutedRequest, Router

VOCABULARY = 50_000
SYSTEM_PROMPTS, SYSTEM_TOKENS = 20, 800
FOLLOWING = 0.5  # share of prompts that go on as an earlier one
NEW_TOKENS = 100  # of these
IN_FLIGHT = 4  # requests at an engine


class Prompts:
    """Random prompts of `length` tokens."""

    def __init__(self, length: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._length = length
        self._systems = [self._tokens(SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
        self._earlier: deque[list[int]] = deque(maxlen=1000)

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(VOCABULARY), k=count)

    def next(self) -> list[int]:
        """Return the next one."""
        begin = self._random.choice(self._systems)
        if self._earlier and self._random.random() < FOLLOWING:
            begin = self._random.choice(self._earlier)[:-NEW_TOKENS]
        prompt = (begin + self._tokens(self._length))[: self._length]
        self._earlier.append(prompt)
        return prompt


def report_of(prompt: list[int], block_size: int) -> PrefixReport:
    """Return the report of an engine that has computed a prompt and had nothing of it before."""
    ends = range(block_size, len(prompt) + 1, block_size)
    keys, key = [], 0
    for end in ends:
        key = hash((key, *prompt[end - block_size : end]))
        keys.append(key)
    return PrefixReport(roots=[(0, "")], stored=[(0, keys, prompt[: len(keys) * block_size])])


def reports_of(pages: int, prompts: Prompts, block_size: int) -> list[bytes]:
    """Return encoded reports that have so many different pages in all."""
    reports, known = list[bytes](), set[int]()
    while len(known) < pages:
        report = report_of(prompts.next(), block_size)
        known.update(report.stored[0][1])
        reports.append(msgspec.msgpack.encode(report))
    return reports


def router_of(name: str, num_engines: int, reports: Sequence[bytes], block_size: int) -> tuple[Router, float]:
    """Return a router of engines that have reported in turn, and the bytes that this has taken."""
    router = ROUTERS[name]()
    decoder = msgspec.msgpack.Decoder(PrefixReport)
    for engine in range(num_engines):
        router.add(engine, block_size)
    tracemalloc.start()
    if router.watches_prefixes:
        for number, report in enumerate(reports):
            router.report(number % num_engines, decoder.decode(report))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return router, size


def measure(router: Router, prompts: Prompts, count: int) -> list[float]:
    """Return the seconds of each of `count` decisions, with some requests in flight at each engine."""
    in_flight, seconds = deque[RoutedRequest](), []
    for _ in range(count):
        prompt = prompts.next()
        request = RoutedRequest(len(prompt), partial(list, prompt))
        began = time.perf_counter()
        router.send(request)
        seconds.append(time.perf_counter() - began)
        in_flight.append(request)
        if len(in_flight) > IN_FLIGHT * len(router.loads):
            router.ended(in_flight.popleft(), 100)
    return seconds


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[4, 64], metavar="N", help="(default 4 and 64)")
    parser.add_argument(
        "--pages", type=int, nargs="+", default=[10**4, 10**5], metavar="N", help="(default 1e4 and 1e5)"
    )
    parser.add_argument("--prompt", type=int, default=2500, metavar="TOKENS", help="length of prompts (default 2500)")
    parser.add_argument("--block-size", type=int, default=32, metavar="TOKENS", help="of a page (default 32)")
    parser.add_argument("--routers", nargs="+", default=list(ROUTERS), choices=list(ROUTERS), help="(default all)")
    parser.add_argument("--decisions", type=int, default=2000, metavar="N", help="of each router (default 2000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    arguments = parser.parse_args()
    print(f"{'router':<18}{'engines':>8}{'pages':>10}{'us, p50':>10}{'p90':>8}{'p99':>8}{'bytes a page':>14}")
    figures = []
    for pages in arguments.pages:
        prompts = Prompts(arguments.prompt, arguments.seed)
        reports = reports_of(pages, prompts, arguments.block_size)
        for num_engines, name in product(arguments.engines, arguments.routers):
            router, size = router_of(name, num_engines, reports, arguments.block_size)
            cuts = quantiles(measure(router, prompts, arguments.decisions), n=100)
            median, most, worst = (1e6 * cuts[percent - 1] for percent in (50, 90, 99))
            per_page = size / pages
            print(f"{name:<18}{num_engines:>8}{pages:>10,}{median:>10.1f}{most:>8.1f}{worst:>8.1f}{per_page:>14.0f}")
            figures.append({
                "router": name, "engines": num_engines, "pages": pages, "bytes_per_page": per_page,
                "microseconds": {"p50": median, "p90": most, "p99": worst},
            })  # fmt: skip
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
