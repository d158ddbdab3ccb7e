"""When a sampled token is a request's last, and why."""

from __future__ import annotations

from typing import NamedTuple

from quire.engine_core.limits import EngineLimits
from quire.engine_core.request import Request, RequestStatus


class End(NamedTuple):
    """How a request ended; `stop_reason` is the token that the client asked to stop at, None for an eos token."""

    status: RequestStatus
    stop_reason: int | None = None
    error: str | None = None
    is_whole: bool = False  # the grammar allows nothing more


def is_last(request: Request, token_id: int) -> bool:
    """Whether the request ends with `token_id`, which it has just been given."""
    return token_id in request.stop_token_ids or request.num_tokens >= request.token_limit


def extend(request: Request, span: list[int]) -> bool:
    """Count the tokens of a span, cut at the first one with which the request ends; return whether there is one."""
    for count, token_id in enumerate(span, 1):
        request.num_tokens += 1
        if is_last(request, token_id):
            del span[count:]
            return True
    return False


def explain_end(request: Request, token_id: int, limits: EngineLimits, *, is_cut: bool = False) -> End:
    """Explain why the request ends with `token_id`.

    A token that stops counts before the length, and so does the end of the grammar, unless the span was cut before it.
    """
    if request.constraint is not None and request.constraint.error is not None:
        return End(RequestStatus.FINISHED_ERROR, error=request.constraint.error)
    if token_id in request.stop_token_ids:
        return End(RequestStatus.FINISHED_STOPPED, None if token_id in request.eos_token_ids else token_id)
    if request.constraint is not None and request.constraint.is_complete and not is_cut:
        return End(RequestStatus.FINISHED_STOPPED, is_whole=True)
    if request.num_tokens >= request.max_total_tokens:
        return End(RequestStatus.FINISHED_LENGTH_CAPPED)
    error = (
        f"the request has grown to {request.num_tokens} tokens, and all {limits.num_pages} KV pages of the engine hold "
        f"{limits.pool_tokens}; lower max_tokens to {request.num_output_tokens} or less, "
        "or start the engine with more KV memory"
    )
    return End(RequestStatus.FINISHED_ERROR, error=error)


def explain_timeout(request: Request) -> str:
    """Why a request whose deadline has passed is where it is."""
    where = {
        RequestStatus.RUNNING: "while it ran",
        RequestStatus.PREEMPTED: "while it waited for KV pages again",
        RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: "while its grammar was being compiled",
    }
    time = round(request.deadline - request.arrival, 6)  # the clock of a host that runs for days has no finer steps
    return (
        f"the time of {time:g} s that the request was given was up "
        f"{where.get(request.status, 'before it could start')}, after {request.num_output_tokens} tokens; "
        "give it more time, or send it when fewer are waiting"
    )
