"""Hours in minutes for a server whose engine is killed: `.venv/bin/python scripts/robustness.py soak --help`.

A closed loop of clients measures what `quire serve` can do. Then requests arrive at random at a share of that rate,
half of them over HTTP and half through `AsyncLLM` from another process; some clients cancel or disconnect, and the pool
of KV pages is too small for all, so that requests are preempted. The engine is killed again and again.

The report has the growth of resident memory of each process with its standard error, and what is left at the end: file
descriptors, threads, tasks, KV pages, shared memory. Exit status 1 if anything was lost, or a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from bench.http_streams import open_stream
from bench.running_server import RunningServer, children_of, open_files, resident_mib, serving

from quire.frontend import AsyncLLM, RequestError, SamplingParams

_WORDS = ["king", "fox", "well", "daughter", "wolf", "gold", "bread", "forest"]
_QUIET_SECONDS = 30.0  # for everything to end
_WARM_UP_SECONDS = 30.0  # of each life of an engine, in which buffers and KV pages are touched for the first time
_MOST_GROWTH = 0.5  # MiB a minute, beyond its error


@dataclass
class Life:
    """Samples of one process: seconds since the begin of the run, and MiB of resident memory."""

    seconds: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)


class Memory:
    """Resident memory of processes over time. A process that starts again is another life of the same name."""

    def __init__(self) -> None:
        self.lives: dict[str, dict[int, Life]] = {}

    def sample(self, name: str, pid: int, seconds: float) -> None:
        """Take a sample, unless the process has just ended."""
        try:
            mib = resident_mib(pid)
        except (OSError, IndexError):  # a zombie has no VmRSS
            return
        life = self.lives.setdefault(name, {}).setdefault(pid, Life())
        life.seconds.append(seconds)
        life.mib.append(mib)

    def growth(self, name: str) -> tuple[float, float]:
        """Return MiB a minute and its standard error: the slope that all lives have in common, each warmed up."""
        times, values = [], []
        for life in self.lives[name].values():
            time_, mib = np.array(life.seconds) / 60, np.array(life.mib)
            warm = time_ >= time_[0] + _WARM_UP_SECONDS / 60
            if warm.sum() >= 3:
                times.append(time_[warm] - time_[warm].mean())
                values.append(mib[warm] - mib[warm].mean())
        if not times:
            return float("nan"), float("nan")
        x, y = np.concatenate(times), np.concatenate(values)
        slope = float(x @ y / (x @ x))
        errors = y - slope * x
        return slope, float(np.sqrt(errors @ errors / max(1, len(x) - len(times) - 1) / (x @ x)))

    def levels(self, name: str) -> list[float]:
        """Return the median of each warmed-up life, in order."""
        lives = self.lives[name].values()
        return [float(np.median(life.mib)) for life in lives if life.seconds[-1] - life.seconds[0] > _WARM_UP_SECONDS]


class Load:
    """Clients of all kinds; `ends` counts how their requests have ended."""

    def __init__(self, server: RunningServer, llm: AsyncLLM, seed: int) -> None:
        self.ends: Counter[str] = Counter()
        self.errors: list[str] = []
        self.num_left_out = 0
        self._url = f"{server.url}/v1/completions"
        self._llm = llm
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    def prompt(self) -> str:
        """Return a prompt of 10 to 330 words, every second of which begins like others."""
        length = self._random.choice((10, 40, 80, 320))
        begin = "Once upon a time there was a little goat, " * 8 if self._random.random() < 0.5 else ""
        return begin + " ".join(self._random.choices(_WORDS, k=length))

    async def one(self) -> None:
        """Run a request of a random kind to its end."""
        kind = self._random.choices(
            ("http", "http dropped", "client", "client cancelled", "client n=3"), (45, 10, 30, 10, 5)
        )[0]
        tokens, prompt, seed = self._random.randint(20, 250), self.prompt(), self._random.getrandbits(32)
        try:
            end = await (self._http if kind.startswith("http") else self._client)(kind, prompt, tokens, seed)
        except (RequestError, OSError) as error:
            end = "error"
            self.errors.append(f"{kind}: {error}")
        self.ends[f"{kind}: {end}"] += 1

    async def arrive(self, rate: float, seconds: float, most: int) -> None:
        """Start `rate` requests a second at random, and let all end.

        While `most` are open, as when the machine has less time for the server than before, no other one is started.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.sleep(self._random.expovariate(rate))
            if len(self._tasks) >= most:
                self.num_left_out += 1
                continue
            task = asyncio.create_task(self.one())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asyncio.gather(*self._tasks)

    async def _http(self, kind: str, prompt: str, tokens: int, seed: int) -> str:
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": seed}
        client = await open_stream(self._url, body)
        if kind == "http dropped":
            await client.began
            await asyncio.sleep(self._random.expovariate(10))
            client.close()
            await client.ended
            return "dropped"
        await client.ended
        if client.result.status != 200 or not client.result.done:
            self.errors.append(f"{kind}: status {client.result.status}, the end of the stream is missing")
            return "error"
        return "length"

    async def _client(self, kind: str, prompt: str, tokens: int, seed: int) -> str:
        samples = 3 if kind == "client n=3" else 1
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed, n=samples)
        most = self._random.randint(1, tokens) if kind == "client cancelled" else tokens + 1
        async for output in self._llm.generate(prompt, params):
            if len(output.outputs[0].token_ids) >= most:
                return "cancelled"
            if output.finished:
                lengths = [len(each.token_ids) for each in output.outputs]
                if lengths != [tokens] * samples:
                    self.errors.append(f"{kind}: {lengths} tokens instead of {tokens} each")
                return output.outputs[0].finish_reason or "none"
        return "nothing"


def shared_memory(pids: list[int]) -> int:
    """Return the number of memory files and shared segments that these processes have open."""
    count = 0
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                count += str(entry.readlink()).startswith(("/memfd:", "/dev/shm/"))  # noqa: S108
            except FileNotFoundError:  # closed in between
                continue
    return count


def held(server: RunningServer, llm: AsyncLLM) -> dict[str, int]:
    """Return what the processes have open now."""
    engine = llm.engine_info.engine_pid
    return {
        "descriptors of the server": open_files(server.pid),
        "descriptors of the engine": open_files(engine),
        "descriptors of the clients": open_files(os.getpid()),
        "threads of the server": len(list(Path(f"/proc/{server.pid}/task").iterdir())),
        "threads of the engine": len(list(Path(f"/proc/{engine}/task").iterdir())),
        "processes": len(children_of(server.pid)),
        "tasks of the clients": len(asyncio.all_tasks()),
        "shared memory": shared_memory([server.pid, engine]),
    }


async def idle(llm: AsyncLLM) -> dict[str, Any]:
    """Wait until the engine has nothing to do; return its statistics."""
    deadline = time.monotonic() + _QUIET_SECONDS
    while llm.is_away or (stats := await llm.stats())["running"] + stats["waiting"]:
        if time.monotonic() > deadline:
            raise SystemExit("the engine does not come to rest")
        await asyncio.sleep(0.1)
    return stats


async def kill(llm: AsyncLLM, every: float, kills: list[float]) -> None:
    """Kill the engine again and again; note when."""
    while True:
        await asyncio.sleep(every)
        kills.append(time.monotonic())
        os.kill(llm.engine_info.engine_pid, signal.SIGKILL)


async def watch(server: RunningServer, llm: AsyncLLM, memory: Memory, preemptions: list[int]) -> None:
    """Take a sample every 5 s, and count the preemptions of each engine."""
    begun, engine = time.monotonic(), 0
    while True:
        now = time.monotonic() - begun
        memory.sample("server", server.pid, now)
        memory.sample("clients", os.getpid(), now)
        if not llm.is_away:
            memory.sample("engine", llm.engine_info.engine_pid, now)
            try:
                count = (await llm.stats())["preemptions"]
            except RequestError:  # it dies meanwhile
                continue
            if llm.engine_info.engine_pid != engine:
                engine = llm.engine_info.engine_pid
                preemptions.append(0)
            preemptions[-1] = count
        await asyncio.sleep(5)


async def measure_capacity(load: Load, clients: int, seconds: float) -> float:
    """Return the requests a second of so many clients, each of which sends when it has its answer."""
    end, begun = time.monotonic() + seconds, time.monotonic()

    async def client() -> None:
        while time.monotonic() < end:
            await load.one()

    await asyncio.gather(*(client() for _ in range(clients)))
    return load.ends.total() / (time.monotonic() - begun)


async def run(server: RunningServer, args: argparse.Namespace) -> int:
    """Load the server; print the report and return the exit status."""
    async with AsyncLLM(engine_address=server.engine_address, reconnect_timeout=60) as llm:
        rate = args.load * await measure_capacity(Load(server, llm, 1), args.clients, args.warmup)
        await idle(llm)
        before, load, memory = held(server, llm), Load(server, llm, 2), Memory()
        kills: list[float] = []
        preemptions: list[int] = []
        print(f"{rate:.1f} requests a second for {args.minutes:g} minutes", flush=True)
        others = [
            asyncio.create_task(watch(server, llm, memory, preemptions)),
            asyncio.create_task(kill(llm, args.kill_every, kills)),
        ]
        await load.arrive(rate, 60 * args.minutes, 2 * args.clients)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        stats = await idle(llm)
        await asyncio.sleep(1)
        after = held(server, llm)
    print(
        f"{load.ends.total()} requests ({load.num_left_out} left out), {len(kills)} kills, {sum(preemptions)} "
        f"preemptions; ends: {dict(load.ends)}"
    )
    for text in load.errors[:10]:
        print(f"  {text}")
    grows = False
    for name in memory.lives:
        slope, error = memory.growth(name)
        grows |= not slope - 2 * error < _MOST_GROWTH
        medians = ", ".join(f"{level:.0f}" for level in memory.levels(name))
        print(
            f"memory of the {name}: {slope:+.3f} MiB a minute (error {error:.3f}); medians of its lives: {medians} MiB"
        )
    more = {what: (before[what], count) for what, count in after.items() if count > before[what]}
    print(f"left: {after}; more than before: {more or 'nothing'}")
    pages = {name: stats[f"pages_{name}"] for name in ("free", "cached", "held", "total")}
    print(f"KV pages: {pages}")
    is_whole = pages["held"] == 0 and pages["free"] + pages["cached"] == pages["total"]
    return 0 if is_whole and not more and not grows and not load.errors else 1


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="default: %(default)s")
    parser.add_argument("--load", type=float, default=0.8, help="share of the capacity (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=48, help="that measure the capacity (default: %(default)s)")
    parser.add_argument("--warmup", type=float, default=30, help="seconds in which they do (default: %(default)s)")
    parser.add_argument("--kill-every", type=float, default=120, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--num-pages", type=int, default=160, help="KV pages (default: %(default)s)")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="the following flags go to `quire serve`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-soak-") as folder:
        flags = [
            "--num-pages",
            str(args.num_pages),
            "--kv-disk",
            folder,
            "--max-restarts",
            "1000000",
            "--log-level",
            "warning",
        ]
        with serving(flags) as server:
            return uvloop.run(run(server, args))
