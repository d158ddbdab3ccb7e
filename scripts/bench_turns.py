"""Short requests of one API key beside long ones of another: `.venv/bin/python scripts/bench_turns.py --help`.

Serves the demo model. Eight connections of one key send long conversations, or long texts and lists to tokenize and
detokenize, one after the other, in a process of its own. The report has the times of the other key's one-line chats.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import statistics
import sys
import threading
import time
from multiprocessing.synchronize import Event
from typing import Any
from urllib.parse import urlsplit

from bench.running_server import serving

_CONNECTIONS = 8
_MESSAGES = 4096  # as many as a body may have
_ROLES = ("user", "assistant")

Request = tuple[str, dict[str, Any]]

_CHAT = [{"role": _ROLES[turn % 2], "content": f"{turn} times"} for turn in range(_MESSAGES - 1)]

KINDS: dict[str, Request | None] = {
    "nothing": None,
    "chats": ("/v1/chat/completions", {"messages": [*_CHAT, {"role": "user", "content": "once"}], "max_tokens": 1}),
    "conversations": ("/tokenize", {"messages": _CHAT}),
    "texts": ("/tokenize", {"prompt": "Once upon a time. " * 3000}),
    "longer texts": ("/tokenize", {"prompt": "Once upon a time. " * 100_000}),
    "tokens": ("/detokenize", {"tokens": [*range(10, 2010)] * 50}),
}
_SHORT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1})


def _send(connection: http.client.HTTPConnection, key: str, path: str, body: str) -> int:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    response.read()
    return response.status


def crowd(url: str, kind: str, stop: Event) -> None:
    """Send long requests until told to stop."""
    request = KINDS[kind]
    assert request is not None
    path, body = request[0], json.dumps(request[1])
    counts: list[int] = []

    def send() -> None:
        connection, count = http.client.HTTPConnection(urlsplit(url).netloc), 0
        while not stop.is_set():
            _send(connection, "long", path, body)
            count += 1
        counts.append(count)

    threads = [threading.Thread(target=send) for _ in range(_CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"  {sum(counts)} requests")


def measure(url: str, seconds: float) -> list[float]:
    """Return the times of short requests."""
    connection, times, end = http.client.HTTPConnection(urlsplit(url).netloc), list[float](), time.monotonic() + seconds
    path, body = _SHORT[0], json.dumps(_SHORT[1])
    while time.monotonic() < end:
        begun = time.monotonic()
        if (status := _send(connection, "short", path, body)) != 200:
            raise RuntimeError(f"a short request has status {status}")
        times.append(time.monotonic() - begun)
    return times


def main() -> int:
    """Measure beside each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="in turn (default: all)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each (default: %(default)s)")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with serving(["--api-key", "long", "--api-key", "short", "--log-level", "warning"]) as server:
        for kind in arguments.kinds:
            stop = context.Event()
            others = context.Process(target=crowd, args=(server.url, kind, stop))
            if KINDS[kind] is not None:
                others.start()
                time.sleep(1.0)
            times = measure(server.url, arguments.seconds)
            stop.set()
            if KINDS[kind] is not None:
                others.join()
            print(f"{kind}: median {1e3 * statistics.median(times):.0f} ms, longest {1e3 * max(times):.0f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
