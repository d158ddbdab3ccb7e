"""A stream beside another client that floods the engine: `.venv/bin/python scripts/bench_neighbours.py --help`.

A client of its own reads one stream of the demo model, over the real socket. Meanwhile another one, in a process of its
own, sends messages of one kind as fast as it can, or fetches KV pages of four prompts again and again, as an engine
with `--kv-peer` does. The report has the stream's rate and its longest gap. Exit status 1 if, beside messages that ask
for no work, a gap exceeds 100 ms or the rate falls below half.

Kinds that begin with "http" are requests and bodies that cost a client little, beside a stream of `quire serve` from
another connection. Exit status 1 if one of its gaps exceeds 100 ms.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from multiprocessing.synchronize import Event
from pathlib import Path

from bench.http_floods import HTTP_FLOODS, measure_floods
from bench_load import long_demo, quantile

from quire.protocol.codec import Frame, encode
from quire.protocol.messages import (
    MAX_ABORTED,
    Abort,
    EngineCoreOutputs,
    EngineCoreRequest,
    KvAck,
    KvCancel,
    KvFetch,
    KvFetched,
    KvHello,
    KvPage,
    Ping,
    Ready,
    SamplingParams,
    UtilityCall,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

_BLOCK = 32  # tokens of a page
_PROMPT_TOKENS = 8000
_NUM_PROMPTS = 4
_LONGEST_GAP = 0.1

_OVERLONG = b"\x92\x02\xdd" + (8_000_000).to_bytes(4, "big") + b"\xa0" * 8_000_000  # an Abort of 8 million ids

FLOODS: dict[str, Callable[[int], list[Frame]]] = {
    "abort": lambda _number: encode(Abort(["nobody"])),
    "long abort": lambda _number: encode(Abort([""] * MAX_ABORTED)),
    "longer abort": lambda _number: [_OVERLONG],
    "ping": lambda _number: encode(Ping()),
    "stats": lambda number: encode(UtilityCall(number, "stats")),
    "ack": lambda number: encode(KvAck(number, 1)),
    "cancel": lambda number: encode(KvCancel(number)),
    "hello": lambda _number: encode(KvHello()),
    "junk": lambda _number: [b"\x93"],
}


def prompt(number: int) -> list[int]:
    """Return one of the prompts whose KV is fetched."""
    return [10 + (7 + number) * position % 2000 for position in range(_PROMPT_TOKENS + 1)]


def flood(address: str, kind: str, begun: Event, stop: Event) -> None:
    """Send messages until told to stop; read what comes back."""
    from engine_process import DealerClient

    with DealerClient(address) as client:
        client.first(Ready)
        begun.set()
        number, frames = 0, FLOODS[kind]
        while not stop.is_set():
            client.socket.send_multipart(frames(number))
            number += 1
            while number % 16 == 0 and client.socket.poll(0):
                client.socket.recv_multipart()
        print(f"  {number} messages")


def fetch(address: str, _kind: str, begun: Event, stop: Event) -> None:
    """Fetch the pages of all prompts, four at a time, until told to stop."""
    from engine_process import DealerClient

    with DealerClient(address) as client:
        client.first(Ready)
        num_taken: dict[int, int] = {}
        num_bytes = 0

        def begin() -> None:
            number = len(num_taken)
            client.send(KvFetch(number, prompt(number % _NUM_PROMPTS), "", 0, _PROMPT_TOKENS // _BLOCK))
            num_taken[number] = 0

        begun.set()
        for _ in range(_NUM_PROMPTS):
            begin()
        while not stop.is_set():
            message = client.receive()
            client.messages.clear()
            if isinstance(message, KvPage):
                num_bytes += memoryview(message.data).nbytes
                num_taken[message.fetch_id] += 1
                client.send(KvAck(message.fetch_id, num_taken[message.fetch_id]))
            elif isinstance(message, KvFetched):
                begin()
        print(f"  {num_bytes / 1e6:.0f} MB")


def measure(address: str, seconds: float) -> tuple[float, list[float]]:
    """Return the tokens per second of a stream, and the gaps between its increments."""
    from engine_process import DealerClient

    with DealerClient(address) as client:
        client.first(Ready)
        params = SamplingParams(max_tokens=2 * _PROMPT_TOKENS, ignore_eos=True)
        client.send(EngineCoreRequest("stream", [40, 50, 60], params))
        client.until(lambda: bool(client.outputs("stream")))
        begun = last = time.monotonic()
        gaps, num_tokens = list[float](), 0
        while last - begun < seconds:
            message = client.receive()
            if isinstance(message, EngineCoreOutputs):
                now = time.monotonic()
                gaps.append(now - last)
                last = now
                num_tokens += sum(len(output.new_token_ids) for output in message.outputs)
                if ended := [output for output in message.outputs if output.finish_reason is not None]:
                    raise SystemExit(f"the stream ended after {num_tokens} tokens, before it was measured: {ended[0]}")
        client.send(Abort(["stream"]))
        client.end("stream")
        return num_tokens / (last - begun), gaps


class Report:
    """Prints what was measured; `is_bounded`: no stream was held up."""

    def __init__(self) -> None:
        self.is_bounded = True

    def add(self, kind: str, rate: float, gaps: list[float], least_rate: float = 0.0) -> None:
        """Print the tokens per second of a stream beside a kind of flood, and its longest gaps in seconds."""
        self.is_bounded &= max(gaps) <= _LONGEST_GAP and rate >= least_rate
        longest, usual = 1e3 * max(gaps), 1e3 * quantile(gaps, 0.99)
        print(f"{kind}: {rate:.0f} tokens/s; longest gap {longest:.1f} ms, p99 {usual:.1f} ms", flush=True)


def measure_engine(context: SpawnContext, model: Path, kinds: list[str], seconds: float, report: Report) -> None:
    """Measure a stream of an engine beside each kind of messages; none may halve the first one's rate."""
    from engine_process import DealerClient, EngineUnderTest

    undisturbed = 0.0
    with EngineUnderTest(model, "--num-pages", "2048", "--threads", "1") as engine:
        with DealerClient(engine.address) as client:
            for number in range(_NUM_PROMPTS):
                client.send(EngineCoreRequest(str(number), prompt(number), SamplingParams(max_tokens=1)))
                client.end(str(number))
        for kind in kinds:
            begun, stop = context.Event(), context.Event()
            disturb = fetch if kind == "fetches" else flood
            other = context.Process(target=disturb, args=(engine.address, kind, begun, stop))
            if kind != "nothing":
                other.start()
                begun.wait()
            rate, gaps = measure(engine.address, seconds)
            stop.set()
            if kind != "nothing":
                other.join()
            undisturbed = undisturbed or rate
            report.add(kind, rate, gaps, undisturbed / 2)


def main() -> int:
    """Measure beside each kind; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    messages, floods = ["nothing", *FLOODS, "fetches"], {f"http {name}": name for name in HTTP_FLOODS}
    kinds = [*messages, *floods]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="in turn (default: all)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each (default: %(default)s)")
    arguments = parser.parse_args()
    context, report = multiprocessing.get_context("spawn"), Report()
    with tempfile.TemporaryDirectory() as folder:
        model = long_demo(Path(folder))
        if chosen := [kind for kind in arguments.kinds if kind in messages]:
            measure_engine(context, model, chosen, arguments.seconds, report)
        if chosen := [floods[kind] for kind in arguments.kinds if kind in floods]:
            measure_floods(context, model, chosen, arguments.seconds, report.add)
    return 0 if report.is_bounded else 1


if __name__ == "__main__":
    sys.exit(main())
