"""What a workload is sent to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from quire.frontend.evaluation.replay.clock import Clock
from quire.frontend.evaluation.replay.record import Outcome, RequestRecord, Sample
from quire.frontend.evaluation.workload.request import WorkloadRequest

Tokens = Callable[[WorkloadRequest], list[int]]
"""Makes the tokens of a request's prompt from its blocks."""

Send = Callable[[RequestRecord, Clock], Awaitable[None]]
"""Sends one request, and fills its record until it has ended. Cancelled, it lets the target end the request."""


class TargetError(RuntimeError):
    """There is no target to send anything to: it does not answer, or is none."""


@dataclass(frozen=True)
class TargetInfo:
    """What is known of a target; None where it does not tell.

    `backend`: "quire" for an engine, else the name of the API. `address`: of the engine's socket, or a URL.
    `special_token_ids` are those that prompts had better not have.
    """

    backend: str
    model: str
    address: str
    max_model_len: int | None = None
    vocab_size: int | None = None
    special_token_ids: frozenset[int] = frozenset()


class Target(Protocol):
    """An engine or a server. Made on no event loop, then used on one; `prepare` is called on a thread."""

    @property
    def info(self) -> TargetInfo:
        """What it is."""

    def prepare(self, request: WorkloadRequest, tokens: Tokens) -> Send:
        """Do all that can be done before the request's time: make its prompt, encode it.

        `ValueError` if it can't be sent at all.
        """

    async def sample(self, clock: Clock) -> Sample | None:
        """How the target is now; None where it does not tell."""

    async def reset_cache(self) -> bool:
        """Empty the prefix cache; False where that can't be done."""

    async def wait_dead(self) -> str:
        """Wait until nothing can be sent any more; returns what has happened."""

    async def close(self) -> None:
        """Leave the target, and end it if it was started for this."""


def prepare(target: Target, request: WorkloadRequest, tokens: Tokens) -> Send:
    """Prepare a request; one that can't be sent at all fails when it is sent, and so is counted."""
    try:
        return target.prepare(request, tokens)
    except ValueError as error:
        message = str(error)

    async def fail(record: RequestRecord, clock: Clock) -> None:
        del clock
        record.outcome, record.error = Outcome.ERRORED, message

    return fail


async def send_within(seconds: float | None, send: Send, record: RequestRecord, clock: Clock) -> None:
    """Send a request, and end it as late when it takes longer than so many seconds; None: it may take any time."""
    try:
        async with asyncio.timeout(seconds):
            await send(record, clock)
    except TimeoutError:
        record.outcome, record.error = Outcome.LATE, f"it took more than {seconds:g} s"
