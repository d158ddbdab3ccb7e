"""Target of a run: the interface of engines and servers, and the sending of requests to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from quire.frontend.evaluation.replay.record import Outcome, RequestRecord, RunClock, TargetSample
from quire.frontend.evaluation.workload.request import WorkloadRequest

Tokens = Callable[[WorkloadRequest], list[int]]
"""Function that makes the tokens of a request's prompt from its blocks."""

Send = Callable[[RequestRecord, RunClock], Awaitable[None]]
"""Function that sends one request and fills its record until it ends. When cancelled, it aborts the request."""

# Parameters that would change the length of an answer, the number of answers, or what comes back of them.
_LENGTHS = (
    "n", "best_of", "beam_width", "length_penalty", "early_stopping", "stop", "stop_token_ids",
    "include_stop_str_in_output", "min_tokens", "max_tokens", "ignore_eos", "bad_words", "detokenize",
)  # fmt: skip


class TargetError(RuntimeError):
    """A target that does not answer, or is no inference server."""


@dataclass(frozen=True)
class TargetInfo:
    """Properties of a target; None where it does not report them.

    `backend`: "quire" for an engine, else the name of the API. `address`: the engine's socket, or a URL.
    `special_token_ids` are tokens that synthetic prompts avoid. `build`: name and version, as far as it tells them.
    """

    backend: str
    model: str
    address: str
    max_model_len: int | None = None
    vocab_size: int | None = None
    special_token_ids: frozenset[int] = frozenset()
    build: str | None = None


class Target(Protocol):
    """An engine or a server. It is used on one event loop; `prepare` is called on a thread."""

    @property
    def info(self) -> TargetInfo:
        """Properties of the target."""

    def prepare(self, request: WorkloadRequest, tokens: Tokens) -> Send:
        """Do what can be done before the request's time, such as making and encoding its prompt.

        Raises `ValueError` if the request cannot be sent at all.
        """

    async def sample(self, clock: RunClock) -> TargetSample | None:
        """Return the target's current state; None where it does not report one."""

    async def reset_cache(self) -> bool:
        """Empty the prefix cache; return False where that is not possible."""

    async def wait_dead(self) -> str:
        """Wait until the target is gone; return what happened."""

    async def close(self) -> None:
        """Disconnect from the target, and end it if it was started for this run."""


def prepare(target: Target, request: WorkloadRequest, tokens: Tokens) -> Send:
    """Prepare a request; one that cannot be sent at all fails when it is sent, and so is counted."""
    try:
        return target.prepare(request, tokens)
    except ValueError as error:
        message = str(error)

    async def fail(record: RequestRecord, clock: RunClock) -> None:
        del clock
        record.outcome, record.error = Outcome.ERRORED, message

    return fail


async def send_within(seconds: float | None, send: Send, record: RequestRecord, clock: RunClock) -> None:
    """Send a request, and end it as late after `seconds`; None is no limit."""
    try:
        async with asyncio.timeout(seconds):
            await send(record, clock)
    except TimeoutError:
        record.outcome, record.error = Outcome.LATE, f"it took more than {seconds:g} s"


def sampling_parameters(request: WorkloadRequest) -> dict[str, Any]:
    """Return the recorded parameters, with defaults where the recording has none; greedy without a recording.

    The answer has exactly the tokens that the workload wants. `ignore_eos` alone ensures the length; `min_tokens` would
    mask logits in each step as well.
    """
    recorded = {"temperature": 0.0} if request.params is None else {"temperature": 1.0, **request.params}
    kept = {name: value for name, value in recorded.items() if name not in _LENGTHS}
    return {**kept, "max_tokens": request.output_tokens, "ignore_eos": True}
