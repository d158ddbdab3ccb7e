"""What tests of replays have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire.frontend.evaluation.replay.load import Load
from quire.frontend.evaluation.replay.record import Outcome, RequestRecord, Sample
from quire.frontend.evaluation.replay.runner import Replay
from quire.frontend.evaluation.replay.target import Target
from quire.frontend.evaluation.workload.prompts import Prompts
from quire.frontend.evaluation.workload.request import BLOCK_TOKENS, WorkloadRequest


@dataclass
class Kept:
    """Keeps all that a run tells."""

    records: list[RequestRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    seconds: float | None = None
    interrupted: str | None = None

    def add(self, record: RequestRecord) -> None:
        """A request has ended."""
        self.records.append(record)

    def sample(self, sample: Sample) -> None:
        """The target has told how it is."""
        self.samples.append(sample)

    def end(self, seconds: float, interrupted: str | None = None, *, stolen: float | None = None) -> None:
        """The run is over."""
        self.seconds, self.interrupted = seconds, interrupted

    @property
    def outcomes(self) -> list[Outcome]:
        """In the order of the workload."""
        return [record.outcome for record in self.in_order]

    @property
    def in_order(self) -> list[RequestRecord]:
        """The records in the order of the workload, less those of the warm-up."""
        return sorted((each for each in self.records if not each.is_warm_up), key=lambda record: record.index)


def request(arrival: float = 0.0, prompt: int = 8, output: int = 4, block: int = 0, **more: object) -> WorkloadRequest:
    """A request whose prompt begins with that of others of the same block."""
    blocks = tuple(1000 * place + block for place in range(-(-prompt // BLOCK_TOKENS)))
    return WorkloadRequest(arrival, prompt, output, blocks, **more)  # type: ignore[arg-type]


async def replay(target: Target, requests: Iterable[WorkloadRequest], load: Load | None = None) -> Kept:
    """A whole run."""
    kept = Kept()
    tokens = Prompts(target.info.vocab_size or 1000, avoid=target.info.special_token_ids).tokens
    await Replay(target, kept, tokens, load or Load()).run(requests)
    return kept


async def until(is_so: Callable[[], object]) -> None:
    """Turn the event loop until something has come about."""
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110 - what is tested tells nobody
            await asyncio.sleep(0)
