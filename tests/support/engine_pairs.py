"""Two engines, of which one fetches KV pages from the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine_process import DealerClient, EngineUnderTest

from quire.protocol.messages import EngineCoreRequest
from quire.protocol.messages import SamplingParams as EngineParams


def ask(
    client: DealerClient, request_id: str, prompt: list[int], max_tokens: int = 8, *, remote_prefill: bool = False
) -> None:
    params = EngineParams(seed=1, max_tokens=max_tokens)
    client.send(EngineCoreRequest(request_id, prompt, params, remote_prefill=remote_prefill))


class Pair:
    """A prefill engine, an engine that fetches from it, and a client of each."""

    def __init__(self, prefill: EngineUnderTest, decode: EngineUnderTest) -> None:
        self.prefill, self.decode = prefill, decode
        self.p, self.d = DealerClient(prefill.address), DealerClient(decode.address)

    def connect(self) -> None:
        self.d.until(lambda: self.d.call("stats")["kv_peer_connected"] == 1)

    @property
    def num_fetched(self) -> int:
        fetched = self.d.call("stats")["kv_peer_pages_fetched"]
        assert isinstance(fetched, int)
        return fetched

    def ask_both(self, prompt: list[int], name: str = "r") -> None:
        ask(self.p, name, prompt, 1)
        ask(self.d, name, prompt, remote_prefill=True)


@contextmanager
def pair(model: Path, *flags: str, decode_flags: tuple[str, ...] = ()) -> Iterator[Pair]:
    """Two engines; `flags` are the first one's. At the end neither holds a page."""
    with (
        EngineUnderTest(model, *flags) as prefill,
        EngineUnderTest(model, "--kv-peer", prefill.address, *decode_flags) as decode,
    ):
        engines = Pair(prefill, decode)
        with engines.p, engines.d:
            yield engines
            engines.d.wait_until_at_rest()
            if prefill.process.poll() is None:
                engines.p.until(lambda: engines.p.call("stats")["pages_held"] == 0)
                engines.p.wait_until_at_rest()
