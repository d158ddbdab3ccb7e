"""Streams over a network that fails: `.venv/bin/python scripts/robustness.py network --help`.

An engine and its client run in network namespaces of their own, whose IP packets pass through a process that delays
them, loses some, reorders them, or holds the line cut for a while. Every answer must equal that of a run over a quiet
line; after a cut that does not heal, each stream must end with an error. Needs root, for namespaces and TUN devices.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import fcntl
import heapq
import multiprocessing
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from chaos import KINDS, differences

from quire.frontend import AsyncLLM, EngineDeadError, SamplingParams

_SCRIPT = Path(__file__).parents[1] / "robustness.py"
_CLONE_NEWNET = 0x40000000  # see clone(2)
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000  # see linux/if_tun.h
_CLIENT, _ENGINE = "10.77.0.1", "10.77.0.2"
_ADDRESS = f"tcp://{_ENGINE}:5777"
_PACKET_BYTES = 65536
_KINDS = [kind for kind in KINDS if kind not in ("beams", "json")]


class Line(NamedTuple):
    """State of the network: its delay in seconds, of which up to `jitter` is random, and the share of packets it loses.

    A cut line loses all packets.
    """

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    is_cut: bool = False


def enter_namespace(own: str, other: str) -> int:
    """Move this thread into a new network namespace; return the descriptor of its only device."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise SystemExit(f"no network namespace: {os.strerror(ctypes.get_errno())}; run this as root")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", b"line", _IFF_TUN | _IFF_NO_PI))
    for words in (f"addr add {own} peer {other} dev line", "link set line up", "link set lo up"):
        subprocess.run(["ip", *words.split()], check=True)  # noqa: S607 - of the system's path
    return descriptor


def relay(ends: tuple[int, int], commands: Connection) -> None:
    """Pass packets between two devices, as the last `Line` of `commands` says, until that is closed."""
    line, waiting, number = Line(), list[tuple[float, int, int, bytes]](), 0
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([*ends, commands.fileno()], [], [], timeout)
        if commands.fileno() in readable:
            try:
                line = commands.recv()
            except EOFError:
                return
        for source, target in (ends, ends[::-1]):
            if source not in readable:
                continue
            packet = os.read(source, _PACKET_BYTES)
            if not line.is_cut and random.random() >= line.loss:
                number += 1
                due = time.monotonic() + line.delay + random.uniform(0.0, line.jitter)
                heapq.heappush(waiting, (due, number, target, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(waiting)
            os.write(target, packet)


def start_engine(model: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """Start an engine in a namespace of its own; return it and its device."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, str(_SCRIPT), "network", "--as-engine", str(theirs.fileno()), *model]
    engine = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE)
    theirs.close()
    _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    return engine, descriptors[0]


def be_engine(channel: int, model: list[str]) -> None:
    """Become an engine in a namespace of its own, whose device goes to the other end of `channel`."""
    device = enter_namespace(_ENGINE, _CLIENT)
    socket.send_fds(socket.socket(fileno=channel), [b"x"], [device])
    arguments = [*model, "--engine-address", _ADDRESS, "--insecure-tcp", "--num-pages", "2048"]
    code = "import sys; from quire.frontend.cli import main; sys.exit(main())"
    os.execv(sys.executable, [sys.executable, "-P", "-c", code, "engine", *arguments])  # noqa: S606


class Streams:
    """Streams of a client, and the longest time for which none of them had a token."""

    def __init__(self, llm: AsyncLLM, count: int, tokens: int) -> None:
        self.longest_pause = 0.0
        self._llm = llm
        self._count = count
        self._tokens = tokens
        self._last = time.monotonic()

    async def run(self) -> list[object]:
        """Return all answers, in order; an error in place of one."""
        self._last = time.monotonic()
        return await asyncio.gather(*(self._one(number) for number in range(self._count)))

    async def _one(self, number: int) -> object:
        kind = _KINDS[number % len(_KINDS)]
        params = SamplingParams(seed=number, max_tokens=self._tokens, ignore_eos=kind != "stop", **KINDS[kind])
        answer: object = None
        try:
            async for output in self._llm.generate(f"Once upon a time there were {number} goats, and", params):
                now = time.monotonic()
                self.longest_pause, self._last = max(self.longest_pause, now - self._last), now
                answer = [(each.token_ids, each.text, each.finish_reason, each.logprobs) for each in output.outputs]
        except EngineDeadError as error:
            return error
        return answer


async def run(args: argparse.Namespace, commands: Connection) -> int:
    """Run the streams over each kind of line; return the exit status."""
    lines = {
        "a delay of 50 to 100 ms": [(Line(0.05, 0.05), args.seconds)],
        "a loss of 5 %": [(Line(0.005, 0.0, 0.05), args.seconds)],
        "reordering by up to 30 ms": [(Line(0.0, 0.03), args.seconds)],
        "a cut of 3 s": [(Line(), 0.5), (Line(is_cut=True), 3.0)],
        "a cut of 12 s": [(Line(), 0.5), (Line(is_cut=True), 12.0)],
    }
    num_wrong = 0
    async with AsyncLLM(engine_address=_ADDRESS, insecure_tcp=True, reconnect_timeout=20.0) as llm:
        expected = await Streams(llm, args.streams, args.tokens).run()
        for name, phases in lines.items():
            streams = Streams(llm, args.streams, args.tokens)
            answers = asyncio.create_task(streams.run())
            for line, seconds in phases:
                commands.send(line)
                await asyncio.wait([answers], timeout=seconds)
            commands.send(Line())
            num_wrong += differences(expected, await answers)
            print(f"{name}: {num_wrong} wrong answers so far; longest pause {streams.longest_pause:.2f} s", flush=True)
        stats = await llm.stats()
        pages = {name: stats[f"pages_{name}"] for name in ("free", "cached", "held", "total")}
        answers = asyncio.create_task(Streams(llm, args.streams, args.tokens).run())
        await asyncio.sleep(0.5)
        commands.send(Line(is_cut=True))
        begun = time.monotonic()
        ends = await answers
        errors = [end for end in ends if isinstance(end, EngineDeadError)]
        print(
            f"a cut that does not heal: {len(errors)} of {args.streams} streams ended with an error, the last "
            f"{time.monotonic() - begun:.1f} s later: {errors[-1:]!r:.300}"
        )
        num_wrong += sum(end != right for end, right in zip(ends, expected, strict=True) if end not in errors)
    print("KV pages before it:", pages)
    return 0 if num_wrong == 0 and errors and pages["held"] == 0 else 1


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a checkpoint; default: the demo model")
    parser.add_argument("--streams", type=int, default=30, help="streams at a time (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of each (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each bad line, at most (default: %(default)s)")
    parser.add_argument("--as-engine", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    model = [] if args.model is None else ["--model", args.model]
    if args.as_engine is not None:
        be_engine(args.as_engine, model)
    engine, theirs = start_engine(model)
    own = enter_namespace(_CLIENT, _ENGINE)
    commands, received = multiprocessing.Pipe()
    line = multiprocessing.get_context("fork").Process(target=relay, args=((own, theirs), received), daemon=True)
    line.start()
    try:
        assert engine.stdout is not None
        if not engine.stdout.readline():
            raise SystemExit("the engine did not start")
        return asyncio.run(run(args, commands))
    finally:
        engine.send_signal(signal.SIGINT)
        engine.wait()
        line.terminate()
