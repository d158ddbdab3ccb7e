"""Latency that users see under load: `.venv/bin/python scripts/bench_load.py --help`.

`mixed`: while chats decode, a prompt of 8,000 tokens arrives, and a short prompt right after it. The report has the
inter-token latency of the chats without and with the long prompt, and the TTFT of the short one.

`overload`: the throughput of a closed loop of clients is measured; then requests arrive three times as fast. The report
has the length of the queue, the latency of refusals, and the inter-token latency of accepted requests.

Everything goes through `AsyncLLM`, the socket and the engine process. The model is the demo model with a longer
context, unless another one is given.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quire.frontend import AsyncLLM, RequestError, SamplingParams
from quire.frontend.engine_args import DEMO_MODEL

LONG_CONTEXT = 16384


@dataclass
class TimedStream:
    """Times of one request: when it was sent, when each token arrived, when it ended."""

    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    error: str = ""
    ended: float = 0.0

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.sent

    def gaps(self, begin: float = 0.0, end: float = float("inf")) -> list[float]:
        """Return the inter-token latencies of tokens that arrived between `begin` and `end`; 0 of those together."""
        return [after - before for before, after in itertools.pairwise(self.times) if begin <= after <= end]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile of the values at this share."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def milliseconds(values: Sequence[float]) -> str:
    """Format the median and p99 of seconds."""
    return f"median {1e3 * quantile(values, 0.5):.2f} ms, p99 {1e3 * quantile(values, 0.99):.2f} ms"


def long_demo(folder: Path) -> Path:
    """Copy the demo model to `folder` with a context of LONG_CONTEXT tokens, where its text means nothing."""
    for file in Path(DEMO_MODEL).iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG_CONTEXT}))
    return folder


class RandomLoad:
    """Requests with random prompts to one engine."""

    def __init__(self, llm: AsyncLLM, seed: int) -> None:
        self._llm = llm
        self._random = random.Random(seed)

    async def run(
        self, prompt_tokens: int, output_tokens: int, streams: list[TimedStream] | None = None
    ) -> TimedStream:
        """Send one request and return its times, which `streams` gets when it begins."""
        prompt = [self._random.randrange(10, 2000) for _ in range(prompt_tokens)]
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
        stream = TimedStream(time.perf_counter())
        if streams is not None:
            streams.append(stream)
        try:
            async for output in self._llm.generate({"prompt_token_ids": prompt}, params, output_kind="delta"):
                stream.times += [time.perf_counter()] * len(output.outputs[0].token_ids)
        except RequestError as error:
            stream.error = str(error)
        stream.ended = time.perf_counter()
        return stream


async def chat(
    load: RandomLoad, arguments: argparse.Namespace, streams: list[TimedStream], is_over: asyncio.Event
) -> None:
    """Request one short answer after the other."""
    while not is_over.is_set():
        streams.append(await load.run(30, arguments.chat_tokens))


async def mixed(llm: AsyncLLM, arguments: argparse.Namespace) -> None:
    """Run chats, a long prompt, and a short one after it."""
    load = RandomLoad(llm, arguments.seed)
    for _ in range(3):  # the engine learns its speed, and touches its memory
        await asyncio.gather(*(load.run(arguments.long_tokens // 4, 8) for _ in range(12)))
    growths, waits, longs = [], [], []
    for repetition in range(arguments.repetitions):
        streams: list[TimedStream] = []
        is_over = asyncio.Event()
        chats = [asyncio.create_task(chat(load, arguments, streams, is_over)) for _ in range(arguments.chats)]
        await asyncio.sleep(arguments.calm_seconds)
        before = await llm.stats()
        begin = time.perf_counter()
        long = asyncio.create_task(load.run(arguments.long_tokens, 1))
        await asyncio.sleep(0.01)
        at_short = await llm.stats()
        short = asyncio.create_task(load.run(30, 4))
        await short
        between = await llm.stats()
        await long
        end = time.perf_counter()
        after = await llm.stats()
        is_over.set()
        await asyncio.gather(*chats)
        calm = [gap for stream in streams for gap in stream.gaps(begin - arguments.calm_seconds, begin)]
        busy = [gap for stream in streams for gap in stream.gaps(begin, end)]
        steps = after["step"] - before["step"]
        chunk = (end - begin) / steps
        growths.append(quantile(busy, 0.99) / quantile(calm, 0.99))
        waits.append(short.result().first / chunk)
        longs.append(long.result().first)
        print(
            f"{repetition + 1}: inter-token latency, calm {milliseconds(calm)}; with the long prompt "
            f"{milliseconds(busy)}: p99 {growths[-1]:.2f} times; long prompt {longs[-1]:.2f} s in {steps} steps; TTFT "
            f"of the short one {1e3 * short.result().first:.1f} ms, {waits[-1]:.1f} chunk times, "
            f"{between['step'] - at_short['step']} steps until it had 4 tokens"
        )
    print(
        f"medians: p99 inter-token latency grows {statistics.median(growths):.2f} times, the short prompt's TTFT "
        f"is {statistics.median(waits):.1f} chunk times, the long one's is {statistics.median(longs):.2f} s"
    )


async def overload(llm: AsyncLLM, arguments: argparse.Namespace) -> None:
    """Measure the capacity, and then send three times as much."""
    load = RandomLoad(llm, arguments.seed)
    choose = random.Random(arguments.seed)

    def one() -> asyncio.Task[TimedStream]:
        return asyncio.create_task(load.run(choose.randrange(20, 200), choose.randrange(20, 100)))

    async def closed_loop(until: float) -> list[TimedStream]:
        streams = []
        while time.perf_counter() < until:
            streams.append(await one())
        return streams

    begin = time.perf_counter()
    until = begin + arguments.seconds / 3
    loops = await asyncio.gather(*(closed_loop(until) for _ in range(arguments.max_num_seqs)))
    done = [stream for streams in loops for stream in streams]
    capacity = len(done) / (time.perf_counter() - begin)
    print(
        f"capacity {capacity:.1f} requests/s; inter-token latency {milliseconds([g for s in done for g in s.gaps()])}"
    )
    tasks: list[asyncio.Task[TimedStream]] = []
    queue: list[int] = []
    begin = time.perf_counter()
    while (now := time.perf_counter()) < begin + arguments.seconds:
        while len(tasks) < (now - begin) * capacity * 3:
            tasks.append(one())
        if len(queue) < now - begin:
            queue.append((await llm.stats())["waiting"])
        await asyncio.sleep(0.002)
    streams = await asyncio.gather(*tasks)
    refused = [stream.ended - stream.sent for stream in streams if stream.error]
    accepted = [stream for stream in streams if not stream.error]
    print(
        f"{len(streams)} requests in {arguments.seconds:g} s, {len(refused)} refused: {milliseconds(refused)}; "
        f"at most {max(queue)} were waiting, of {arguments.max_waiting} allowed"
    )
    print(
        f"accepted: {len(accepted) / arguments.seconds:.1f} requests/s; inter-token latency "
        f"{milliseconds([gap for stream in accepted for gap in stream.gaps()])}; TTFT "
        f"{milliseconds([stream.first for stream in accepted])}"
    )
    stats = await llm.stats()
    print(
        f"afterwards: running {stats['running']}, waiting {stats['waiting']}, pages held {stats['pages_held']} of "
        f"{stats['pages_total']}, {stats['preemptions']} preemptions"
    )


def main() -> None:
    """Run one of the loads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("load", choices=("mixed", "overload"))
    parser.add_argument("--model", help="checkpoint folder; the demo model with a longer context by default")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    group = parser.add_argument_group("mixed")
    group.add_argument("--chats", type=int, default=16, metavar="N")
    group.add_argument("--chat-tokens", type=int, default=200, metavar="N", help="tokens of each answer")
    group.add_argument("--long-tokens", type=int, default=8000, metavar="N", help="tokens of the long prompt")
    group.add_argument("--calm-seconds", type=float, default=3.0, metavar="S", help="seconds before the long prompt")
    group.add_argument("--repetitions", type=int, default=5, metavar="N")
    group = parser.add_argument_group("overload")
    group.add_argument("--seconds", type=float, default=60.0, metavar="S")
    group.add_argument("--max-num-seqs", type=int, default=32, metavar="N")
    group.add_argument("--max-waiting", type=int, default=64, metavar="N", help="limit of waiting requests")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or str(long_demo(Path(folder)))
        bounds = (arguments.max_num_seqs, arguments.max_waiting) if arguments.load == "overload" else (256, 4096)
        llm = AsyncLLM(
            model, threads=arguments.threads, kv_cache_memory_bytes="256MiB", max_num_seqs=bounds[0],
            max_waiting_requests=bounds[1],
        )  # fmt: skip
        try:
            asyncio.run((mixed if arguments.load == "mixed" else overload)(llm, arguments))
        finally:
            llm.close()


if __name__ == "__main__":
    main()
