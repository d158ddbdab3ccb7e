"""Streams that outlive their engine: `.venv/bin/python scripts/robustness.py chaos --help`.

Streams of all kinds run through `AsyncLLM` and through an HTTP server while the engine is hit at random points: by
signals (kill, segv, stop, term, int), by a kill while the process that stands by is stopped (standby), by a request of
another client that crashes each engine which works on it (bomb), or whose schema crashes the process that compiles it
(grammar), by the kernel as memory is short (oom, which needs root and cgroups), by a step that fails once it has
sampled (step). With several engines (--engines) each hit has another victim, and one may leave the set and come back
(drain). Every answer must equal that of one engine which nothing disturbs, or begin it where a deadline ends it; each
must end once, and both bombs with an error. The report has the time from each hit to the next token. Exit status 1 if
an answer differs or is missing, or an engine does not account for all its KV pages.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from quire.frontend import AsyncLLM, EngineConnectionError, EngineDeadError, SamplingParams
from quire.protocol.messages import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 0.95},
    "n": {"temperature": 0.9, "n": 3},
    "beams": {"beam_width": 3, "n": 2, "temperature": 0.0},
    "json": {"temperature": 0.7, "structured_outputs": StructuredOutputs(json=json.dumps(SCHEMA))},
    "regex": {"temperature": 1.0, "structured_outputs": StructuredOutputs(regex=r"(\w{2,9}[ ,.]){60}")},
    "deadline": {"temperature": 0.9},  # which ends some of them
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "stop": {"temperature": 0.8, "stop": ["the King", "\n\n"]},
    "logprobs": {"temperature": 1.1, "top_k": 40, "logprobs": 3, "prompt_logprobs": 1},
}
HTTP_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1, "top_p": 0.9, "logprobs": 2},
    "penalties": {"frequency_penalty": 0.8, "presence_penalty": 0.4},
    "n": {"temperature": 0.9, "n": 2},
}
_DEADLINES = (0.3, 3.0)  # seconds, at random
_BEAM_TOKENS = 60  # few, since a search begins anew with each engine
SIGNALS = {
    "kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP, "term": signal.SIGTERM,
    "int": signal.SIGINT, "standby": signal.SIGKILL,
}  # fmt: skip
HITS = [*SIGNALS, "bomb", "grammar", "oom", "step", "drain"]
_REFERENCES = 4000  # in a row, in the schema of a grammar bomb
_BOMB = 1234  # first token of a prompt
_BOMB_TOKENS = 40  # of the request as it crashes an engine
_OOM_SECONDS = 5.0  # for which memory is short: an engine that needs none lives on
_CGROUPS = {"memory": "memory.limit_in_bytes", "": "memory.max"}  # of version 1 and 2

# Runs in each engine, as its `sitecustomize`: where the flag is, the next step fails when it is done, and bombs go off.
_FAILING_STEPS = """
import sys
if "quire.engine_core" in sys.orig_argv:
    import os, signal
    from pathlib import Path
    from quire.engine_core.scheduling.trials import Trials
    from quire.kernels.runner import ModelRunner
    flag, init = Path({flag!r}), ModelRunner.__init__
    def failing_init(runner, *arguments):
        init(runner, *arguments)
        submit = runner.submit
        def failing_submit(step):
            result = submit(step)
            if flag.exists():
                flag.unlink()
                while runner.collect_pending(result):
                    pass
                raise RuntimeError("out of luck")
            return result
        runner.submit = failing_submit
    ModelRunner.__init__ = failing_init
    begin_step = Trials.begin_step
    def begin_deadly_step(trials, batch):
        begin_step(trials, batch)
        for request in batch.requests:
            if request.prompt_token_ids[0] == {bomb} and request.num_tokens >= {bomb_tokens}:
                os.kill(os.getpid(), signal.SIGSEGV)
    Trials.begin_step = begin_deadly_step
"""


@dataclass
class Choice:
    """A choice of an answer over HTTP; it has one reason for which it ends."""

    text: str = ""
    reasons: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add(self, chunk: dict[str, Any]) -> None:
        """Append a part of the stream."""
        self.text += chunk["text"]
        self.logprobs += (chunk.get("logprobs") or {}).get("token_logprobs", [])
        if chunk["finish_reason"]:
            self.reasons.append(chunk["finish_reason"])


class Streams:
    """The streams of one run, and when their tokens arrived."""

    def __init__(self, llm: AsyncLLM, url: str, count: int, tokens: int, *, has_deadlines: bool = True) -> None:
        self._has_deadlines = has_deadlines
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
        ignore_eos = kind not in ("beams", "json", "regex", "stop")
        max_tokens = min(self._tokens, _BEAM_TOKENS) if kind == "beams" else self._tokens
        params = SamplingParams(seed=number, max_tokens=max_tokens, ignore_eos=ignore_eos, **KINDS[kind])
        timeout = random.uniform(*_DEADLINES) if kind == "deadline" and self._has_deadlines else None
        answer: list[object] = []
        async for output in self._llm.generate(prompt, params, timeout=timeout):
            self.arrivals.append(time.monotonic())
            answer += [
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
        choices: dict[int, Choice] = {}
        num_ends = 0
        with urllib.request.urlopen(request) as reply:  # noqa: S310
            for line in reply:
                num_ends += line.startswith(b"data: [DONE]")
                if not line.startswith(b"data: {"):
                    continue
                self.arrivals.append(time.monotonic())
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return chunk["error"]["message"]
                for choice in chunk["choices"]:
                    choices.setdefault(choice["index"], Choice()).add(choice)
        return choices, num_ends


@asynccontextmanager
async def serving(addresses: list[str]) -> AsyncIterator[str]:
    """Serve the engines at some addresses over HTTP; yield the server's URL."""
    command = [sys.executable, "-P", "-c", "from quire.frontend.cli import main; main()", "serve", "--port", "0"]
    engines = [flag for address in addresses for flag in ("--engine", address)]
    server = await asyncio.create_subprocess_exec(*command, *engines, stdout=subprocess.PIPE)
    assert server.stdout is not None
    try:
        while b"http://" not in (line := await server.stdout.readline()):
            assert line, "the server did not start"
        yield line.decode().split()[-1]
    finally:
        with suppress(ProcessLookupError):  # it did not start
            server.terminate()
        await server.wait()


@asynccontextmanager
async def short_memory(pid: int) -> AsyncIterator[None]:
    """Have a process in a cgroup that has no memory: the kernel kills it once it needs a page more."""
    folders = [Path("/sys/fs/cgroup", name) for name in _CGROUPS]
    parent = next(folder for folder in folders if (folder / "cgroup.procs").exists())
    folder = parent / f"quire-chaos-{os.getpid()}"
    folder.mkdir()
    try:
        for limit in _CGROUPS.values():
            if (folder / limit).exists():
                (folder / limit).write_text("4096")
        with suppress(ProcessLookupError):  # it has ended
            (folder / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with suppress(ProcessLookupError):
            (parent / "cgroup.procs").write_text(str(pid))
        while folder.exists():
            with suppress(OSError):  # the process that the kernel has killed is still in it
                folder.rmdir()
            await asyncio.sleep(0.001)


class Hitter:
    """Hits the engine again and again; `delays` has the seconds from hits to the next token, by kind. There is none if
    the round ended before."""

    def __init__(self, llm: AsyncLLM, url: str, kinds: Iterator[str], pause: tuple[float, float], flag: Path) -> None:
        self.num_hits = Counter[str]()
        self.delays: dict[str, list[float]] = {}
        self.bombs: list[asyncio.Task[str]] = []  # which return what has become of them
        self._llm = llm
        self._url = url
        self._kinds = kinds
        self._pause = pause
        self._flag = flag

    async def run(self, streams: Streams) -> None:
        """Hit until cancelled."""
        while True:
            await asyncio.sleep(random.uniform(*self._pause))
            if (kind := next(self._kinds, None)) is None:
                return
            begun = time.monotonic()
            delays = self.delays.setdefault(kind, [])
            self.num_hits[kind] += 1
            await self._hit(kind)
            num_arrived = len(streams.arrivals)  # none of them comes after the hit
            while len(streams.arrivals) == num_arrived:  # noqa: ASYNC110 - they come on other threads too
                await asyncio.sleep(0.001)
            delay = streams.arrivals[num_arrived] - begun
            if kind in ("bomb", "drain"):  # the one goes off more than once, the other waits for an engine to be back
                delay = longest_gap(begun, streams.arrivals)
            delays.append(delay)
            print(f"  {kind}: next token after {delay:.3f} s", flush=True)

    async def _hit(self, kind: str) -> None:
        """Hit an engine; return once it feels that, which most do not survive."""
        victim = random.choice(self._llm.engines())
        pid = victim.ready.engine_pid
        if kind == "drain":
            await asyncio.shield(asyncio.create_task(self._leave_and_join()))  # which may outlive a round of streams
            return
        if kind == "step":
            self._flag.touch()
            while self._flag.exists():  # noqa: ASYNC110 - the engine removes it
                await asyncio.sleep(0.001)
            return
        if kind in BOMBS:
            body = BOMBS[kind](len(self.bombs))
            self.bombs.append(asyncio.create_task(asyncio.to_thread(send_bomb, self._url, body)))
            await asyncio.shield(self.bombs[-1])  # which may outlive a round of streams
            return
        if kind == "standby" and victim.supervised:
            await self._stop_standby(victim.number)
        if kind == "oom":
            async with short_memory(pid):
                await self._wait_until_away(pid, time.monotonic() + _OOM_SECONDS)
            return
        with suppress(ProcessLookupError):  # it ends already, of the hit before
            os.kill(pid, SIGNALS[kind])
        await self._wait_until_away(pid, math.inf)

    async def _wait_until_away(self, pid: int, deadline: float) -> None:
        """Wait until the client has lost its connection with an engine's process."""
        while time.monotonic() < deadline:
            if pid not in [engine.ready.engine_pid for engine in self._llm.engines() if engine.state != "away"]:
                return
            await asyncio.sleep(0.001)

    async def _leave_and_join(self) -> None:
        """Have an engine leave that is not this client's own, and join again."""
        engine = next((engine for engine in self._llm.engines() if not engine.supervised), None)
        if engine is None:  # it has left already
            return
        has_left = False
        while not has_left:
            with suppress(ValueError):  # it is the only one that is there, as another hit has killed the others
                await self._llm.remove_engine(engine.number, drain_timeout=random.choice((0.0, 0.2)))
                has_left = True
            await asyncio.sleep(0.05)
        is_back = False
        while not is_back:
            with suppress(EngineConnectionError):  # it is being started again, after another hit
                await self._llm.add_engine(engine.address)
                is_back = True
            await asyncio.sleep(0.05)

    async def _stop_standby(self, engine: int) -> None:
        """Stop the process that stands by for an engine, once there is one."""
        supervisor = self._llm._engine.engines.supervisors[engine]  # noqa: SLF001 - nobody else knows it
        while (standby := supervisor._standby.process) is None:  # noqa: ASYNC110, SLF001
            await asyncio.sleep(0.01)
        os.kill(standby.pid, signal.SIGSTOP)


def longest_gap(begun: float, arrivals: list[float]) -> float:
    """Return the longest time without a token since a moment."""
    times = [begun, *sorted(when for when in arrivals if when > begun)]
    return max(after - before for before, after in itertools.pairwise(times))


def crashing_prompt(number: int) -> dict[str, Any]:
    """Return a request whose prompt crashes engines, each time another one."""
    return {"prompt": [_BOMB, number], "max_tokens": 2 * _BOMB_TOKENS, "ignore_eos": True}


def crashing_schema(number: int) -> dict[str, Any]:
    """Return a request with a schema of references in a row, each time another one."""
    chain: dict[str, Any] = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(_REFERENCES)}
    chain[f"d{_REFERENCES}"] = {"type": "string", "maxLength": 20 + number}
    schema = {"$defs": chain, "type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}, "required": ["x"]}
    return {"prompt": "Hello", "max_tokens": 20, "structured_outputs": {"json": schema}}


BOMBS: dict[str, Callable[[int], dict[str, Any]]] = {"bomb": crashing_prompt, "grammar": crashing_schema}


def send_bomb(url: str, body: dict[str, Any]) -> str:
    """Ask for a completion; return the error."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request) as reply:  # noqa: S310
            return f"no error, but {reply.read()[:200]!r}"
    except urllib.error.HTTPError as error:
        return f"{error.code} {json.loads(error.read())['error']['message']:.120}"


def is_begin(answer: object, whole: object) -> bool:
    """Return whether a deadline has ended an answer that would have become this one."""
    match answer, whole:
        case [(Sequence() as tokens, _, "timeout", _, _)], [(Sequence() as all_tokens, *_)]:
            return bool(all_tokens[: len(tokens)] == tokens)
    return False


def differences(expected: list[object], answers: list[object]) -> int:
    """Print the answers that differ; return their number."""
    count = 0
    for number, (one, other) in enumerate(zip(expected, answers, strict=True)):
        if one != other and not is_begin(other, one):
            count += 1
            print(f"  stream {number} differs:\n    {one!r:.300}\n    {other!r:.300}")
    return count


@asynccontextmanager
async def engines(args: argparse.Namespace, options: dict[str, Any]) -> AsyncIterator[tuple[AsyncLLM, list[str]]]:
    """Start all engines, and with several one more that is not the client's own; yield it, and their addresses."""
    options = {"max_restarts": 10**6, "num_pages": args.num_pages, **options}
    if args.engines == 1:
        async with AsyncLLM(args.model, **options) as llm:
            yield llm, [llm.engine_address]
        return
    options["threads"] = 1
    async with (
        AsyncLLM(args.model, **options) as other,
        AsyncLLM(args.model, data_parallel_size=args.engines - 1, router=args.router, **options) as llm,
    ):
        await llm.add_engine(other.engine_address)
        yield llm, [engine.address for engine in llm.engines()]


async def run(args: argparse.Namespace, flag: Path) -> int:
    """Run all rounds; return the exit status."""
    options = {"kv_disk": args.kv_disk, "speculative_config": args.speculative_config}
    threads = ThreadPoolExecutor(args.streams + 4)  # one for each stream over HTTP, and for bombs
    asyncio.get_running_loop().set_default_executor(threads)
    async with AsyncLLM(args.model, num_pages=args.num_pages) as one, serving([one.engine_address]) as url:
        begun = time.monotonic()
        expected = await Streams(one, url, args.streams, args.tokens, has_deadlines=False).run()
        print(f"undisturbed: {args.streams} streams in {time.monotonic() - begun:.2f} s", flush=True)
    async with engines(args, options) as (llm, addresses), serving(addresses) as url:
        num_wrong, kinds = 0, itertools.islice(itertools.cycle(args.hits), args.most)
        hitter = Hitter(llm, url, kinds, args.pause, flag)
        for number in range(args.rounds):
            streams = Streams(llm, url, args.streams, args.tokens)
            hits = asyncio.create_task(hitter.run(streams))
            answers = await streams.run()
            hits.cancel()
            with suppress(asyncio.CancelledError):
                await hits
            num_wrong += differences(expected, answers)
            print(f"round {number + 1}: {num_wrong} wrong answers so far", flush=True)
        bombs = await asyncio.gather(*hitter.bombs)
        flag.unlink(missing_ok=True)  # noqa: ASYNC240
        pages = await pages_of(llm, args.engines)
    for kind, delays in hitter.delays.items():
        print(f"{hitter.num_hits[kind]} hits by {kind}{summary(delays)}")
    for text, count in Counter(bombs).items():
        print(f"{count} bombs ended with {text}")
    num_wrong += sum(text.startswith("no error") for text in bombs)
    is_whole = True
    for engine, counts in pages.items():
        print(f"KV pages of engine {engine}: {counts}")
        is_whole &= counts["held"] == 0 and counts["free"] + counts["cached"] == counts["total"]
    return 0 if num_wrong == 0 and is_whole and hitter.num_hits else 1


def summary(delays: list[float]) -> str:
    """Return what the report says of the seconds from hits of one kind to the next token."""
    if not delays:
        return ", at the end of a round"
    delays = sorted(delays)
    p99 = delays[min(len(delays) - 1, int(0.99 * len(delays)))]
    return f"; seconds to the next token: p50 {statistics.median(delays):.3f}, p99 {p99:.3f}"


async def pages_of(llm: AsyncLLM, count: int) -> dict[int, dict[str, int]]:
    """Return the KV pages of each engine, once all are there."""
    while True:
        with suppress(EngineDeadError):
            if len(stats := await llm.engine_stats()) == count:
                names = ("free", "cached", "held", "total")
                return {each: {name: found[f"pages_{name}"] for name in names} for each, found in stats.items()}
        await asyncio.sleep(0.01)


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
    parser.add_argument("--engines", type=int, default=1, help="engines that share the streams (default: %(default)s)")
    parser.add_argument("--router", help="how streams are routed among them")
    parser.add_argument("--speculative-config", metavar="JSON", help="of the engines that are hit: same tokens, sooner")
    parser.add_argument("--kv-disk", metavar="FOLDER", help="keep KV pages there too")
    parser.add_argument("--seed", type=int, default=0, help="of the times of the hits")
    args = parser.parse_args()
    if args.engines == 1 and "drain" in args.hits:
        parser.error("drain needs --engines 2 or more")
    random.seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        flag = Path(folder, "flag")
        steps = _FAILING_STEPS.format(flag=str(flag), bomb=_BOMB, bomb_tokens=_BOMB_TOKENS)
        Path(folder, "sitecustomize.py").write_text(steps)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        return uvloop.run(run(args, flag))
