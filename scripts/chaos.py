"""Streams that outlive their engine: `.venv/bin/python scripts/chaos.py --help`.

Streams of all kinds run through `AsyncLLM` and through an HTTP server while the engine is hit by signals at random
points. Every answer must equal that of a run which nothing disturbs. The report has the time from each hit to the next
token. Exit status 1 if an answer differs or is missing, or the engine does not account for all its KV pages.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvloop

from quire.frontend import AsyncLLM, SamplingParams
from quire.protocol.messages import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 0.95},
    "n": {"temperature": 0.9, "n": 3},
    "beams": {"beam_width": 3, "n": 2, "temperature": 0.0},
    "json": {"temperature": 0.7, "structured_outputs": StructuredOutputs(json=json.dumps(SCHEMA))},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "stop": {"temperature": 0.8, "stop": ["the King", "\n\n"]},
    "logprobs": {"temperature": 1.1, "top_k": 40, "logprobs": 3, "prompt_logprobs": 1},
}
HTTP_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1, "top_p": 0.9, "logprobs": 2},
    "penalties": {"frequency_penalty": 0.8, "presence_penalty": 0.4},
}
_BEAM_TOKENS = 60  # few, since a search begins anew with each engine
HITS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}


class Streams:
    """The streams of one run, and when their tokens arrived."""

    def __init__(self, llm: AsyncLLM, url: str, count: int, tokens: int) -> None:
        self._llm = llm
        self._url = url
        self._count = count
        self._tokens = tokens
        self.arrivals: list[float] = []

    async def run(self) -> list[object]:
        """Return all answers, in order."""
        return await asyncio.gather(*(self._one(number) for number in range(self._count)))

    async def _one(self, number: int) -> object:
        kind = next(itertools.islice(itertools.cycle([*KINDS, *(f"http {name}" for name in HTTP_KINDS)]), number, None))
        prompt = f"Once upon a time there were {number} {'little ' * (number % 7)}goats, and"
        if kind.startswith("http "):
            return await asyncio.to_thread(self._over_http, prompt, HTTP_KINDS[kind[5:]], number)
        ignore_eos = kind not in ("beams", "json", "stop")
        max_tokens = min(self._tokens, _BEAM_TOKENS) if kind == "beams" else self._tokens
        params = SamplingParams(seed=number, max_tokens=max_tokens, ignore_eos=ignore_eos, **KINDS[kind])
        answer: list[object] = []
        async for output in self._llm.generate(prompt, params):
            self.arrivals.append(time.monotonic())
            answer = [
                (each.token_ids, each.text, each.finish_reason, each.stop_reason, each.logprobs)
                for each in output.outputs
                if output.finished
            ]
        return answer

    def _over_http(self, prompt: str, fields: dict[str, Any], number: int) -> object:
        body = {"prompt": prompt, "max_tokens": self._tokens, "seed": number, "stream": True, "ignore_eos": True}
        data = json.dumps({**body, **fields}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/v1/completions", data, headers)  # noqa: S310 - http
        text, reasons, logprobs = "", [], []
        with urllib.request.urlopen(request) as reply:  # noqa: S310
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                self.arrivals.append(time.monotonic())
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return chunk["error"]["message"]
                for choice in chunk["choices"]:
                    text += choice["text"]
                    logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
                    reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        return text, reasons, logprobs


@asynccontextmanager
async def serving(address: str) -> AsyncIterator[str]:
    """Serve the engine at `address` over HTTP; yield the server's URL."""
    command = [sys.executable, "-P", "-c", "from quire.frontend.cli import main; main()", "serve", "--port", "0"]
    server = await asyncio.create_subprocess_exec(*command, "--engine-address", address, stdout=subprocess.PIPE)
    assert server.stdout is not None
    try:
        while b"http://" not in (line := await server.stdout.readline()):
            assert line, "the server did not start"
        yield line.decode().split()[-1]
    finally:
        with suppress(ProcessLookupError):  # it did not start
            server.terminate()
        await server.wait()


async def hit(llm: AsyncLLM, kinds: Iterator[str], streams: Streams, pause: tuple[float, float]) -> list[float]:
    """Hit the engine again and again until cancelled; return the seconds from each hit to the next token."""
    delays: list[float] = []
    try:
        for kind in kinds:
            await asyncio.sleep(random.uniform(*pause))
            pid, begun = llm.engine_info.engine_pid, time.monotonic()
            os.kill(pid, HITS[kind])
            while llm.engine_info.engine_pid == pid:  # noqa: ASYNC110 - it is set by another thread
                await asyncio.sleep(0.001)
            num_arrived = len(streams.arrivals)  # none of them is of the next engine
            while len(streams.arrivals) == num_arrived:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            delays.append(streams.arrivals[num_arrived] - begun)
            print(f"  {kind}: next token after {delays[-1]:.3f} s", flush=True)
    except asyncio.CancelledError:
        pass
    return delays


def differences(expected: list[object], answers: list[object]) -> int:
    """Print the answers that differ; return their number."""
    count = 0
    for number, (one, other) in enumerate(zip(expected, answers, strict=True)):
        if one != other:
            count += 1
            print(f"  stream {number} differs:\n    {one!r:.300}\n    {other!r:.300}")
    return count


async def run(args: argparse.Namespace) -> int:
    """Run all rounds; return the exit status."""
    async with (
        AsyncLLM(args.model, max_restarts=10**6, num_pages=args.num_pages) as llm,
        serving(llm.engine_address) as url,
    ):
        undisturbed = Streams(llm, url, args.streams, args.tokens)
        begun = time.monotonic()
        expected = await undisturbed.run()
        print(f"undisturbed: {args.streams} streams in {time.monotonic() - begun:.2f} s", flush=True)
        delays, num_wrong = [], 0
        kinds = itertools.islice(itertools.cycle(args.hits), args.most)
        for number in range(args.rounds):
            streams = Streams(llm, url, args.streams, args.tokens)
            hits = asyncio.create_task(hit(llm, kinds, streams, args.pause))
            answers = await streams.run()
            hits.cancel()
            delays += await hits
            num_wrong += differences(expected, answers)
            print(f"round {number + 1}: {num_wrong} wrong answers so far", flush=True)
        while llm.is_away:  # noqa: ASYNC110 - it is set by another thread
            await asyncio.sleep(0.01)
        stats = await llm.stats()
        pages = {name: stats[f"pages_{name}"] for name in ("free", "cached", "held", "total")}
    delays.sort()
    if delays:
        print(
            f"{len(delays)} hits; seconds to the next token: p50 {statistics.median(delays):.3f}, "
            f"p99 {delays[min(len(delays) - 1, int(0.99 * len(delays)))]:.3f}"
        )
    print("KV pages:", pages)
    is_whole = pages["held"] == 0 and pages["free"] + pages["cached"] == pages["total"]
    return 0 if num_wrong == 0 and is_whole and delays else 1


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a checkpoint; default: the demo model")
    parser.add_argument("--streams", type=int, default=100, help="streams at a time (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="runs of all streams (default: %(default)s)")
    parser.add_argument(
        "--hits", nargs="+", choices=HITS, default=["kill", "segv"], help="in turns (default: kill segv)"
    )
    parser.add_argument("--pause", type=float, nargs=2, default=(0.5, 2.0), metavar="S", help="between hits, at random")
    parser.add_argument("--most", type=int, metavar="N", help="hits in all (default: as many as the time allows)")
    parser.add_argument("--num-pages", type=int, default=2048, help="KV pages (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the times of the hits")
    args = parser.parse_args()
    random.seed(args.seed)
    return uvloop.run(run(args))


if __name__ == "__main__":
    sys.exit(main())
