"""Helpers for tests of replays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from patience import PATIENCE

from quire.frontend.evaluation.replay.load import Load
from quire.frontend.evaluation.replay.record import Outcome, RequestRecord, TargetSample
from quire.frontend.evaluation.replay.runner import Replay
from quire.frontend.evaluation.replay.target import Target
from quire.frontend.evaluation.workload.blocks import Prompts
from quire.frontend.evaluation.workload.request import BLOCK_TOKENS, WorkloadRequest


@dataclass
class KeptRun:
    """Collector that keeps everything of a run."""

    records: list[RequestRecord] = field(default_factory=list)
    samples: list[TargetSample] = field(default_factory=list)
    seconds: float | None = None
    interrupted: str | None = None

    def add(self, record: RequestRecord) -> None:
        """See `RunCollector`."""
        self.records.append(record)

    def sample(self, sample: TargetSample) -> None:
        """See `RunCollector`."""
        self.samples.append(sample)

    def end(self, seconds: float, interrupted: str | None = None, *, steal: float | None = None) -> None:
        """See `RunCollector`."""
        self.seconds, self.interrupted = seconds, interrupted

    @property
    def outcomes(self) -> list[Outcome]:
        """Outcomes in the order of the workload."""
        return [record.outcome for record in self.in_order]

    @property
    def in_order(self) -> list[RequestRecord]:
        """Records in the order of the workload, without those of the warm-up."""
        return sorted((each for each in self.records if not each.is_warm_up), key=lambda record: record.index)


def request(arrival: float = 0.0, prompt: int = 8, output: int = 4, block: int = 0, **more: object) -> WorkloadRequest:
    """Return a request whose prompt shares a prefix with those of the same `block`."""
    blocks = tuple(1000 * place + block for place in range(-(-prompt // BLOCK_TOKENS)))
    return WorkloadRequest(arrival, prompt, output, blocks, **more)  # type: ignore[arg-type]


async def replay(target: Target, requests: Iterable[WorkloadRequest], load: Load | None = None) -> KeptRun:
    """Replay requests to the end and return the records."""
    kept = KeptRun()
    tokens = Prompts(target.info.vocab_size or 1000, avoid=target.info.special_token_ids).tokens
    await Replay(target, kept, tokens, load or Load()).run(requests)
    return kept


async def until(is_so: Callable[[], object]) -> None:
    """Run the event loop until the condition holds."""
    async with asyncio.timeout(PATIENCE):
        while not is_so():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)
