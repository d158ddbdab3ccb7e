"""The reasons why a request ends, as its client is told them."""

from __future__ import annotations

from quire.engine_core.request import Request, RequestStatus
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import EngineCoreEvent, EngineCoreOutput, ErrorKind, EventType, FinishReason


def end_output(
    request: Request, output: EngineCoreOutput, limits: EngineShape, now: float, *, is_cut: bool = False
) -> None:
    """Make `output`, which carries the request's last token, its terminal output, and explain the end.

    A token that stops counts before the length, and so does the end of a grammar, unless the span was cut before it.
    """
    token_id, constraint = output.new_token_ids[-1], request.constraint
    output.events.append(EngineCoreEvent(EventType.FINISHED, now))
    if constraint is not None and constraint.error is not None:
        _fail(output, constraint.error)
    elif token_id in request.stop.token_ids:
        output.finish_reason = FinishReason.STOP
        output.stop_reason = None if token_id in request.stop.eos_token_ids else token_id
    elif constraint is not None and constraint.is_complete and not is_cut:
        output.finish_reason, output.is_whole = FinishReason.STOP, True
    elif request.num_tokens >= request.stop.max_total_tokens:
        output.finish_reason = FinishReason.LENGTH
    else:
        _fail(
            output,
            f"the request has grown to {request.num_tokens} tokens, and all {limits.num_pages} KV pages of the engine "
            f"hold {limits.pool_tokens}; lower max_tokens to {request.num_output_tokens} or less, "
            "or start the engine with more KV memory",
        )


def _fail(output: EngineCoreOutput, error: str) -> None:
    output.finish_reason, output.error, output.error_kind = FinishReason.ERROR, error, ErrorKind.INVALID


def explain_timeout(request: Request) -> str:
    """Return the error of a request whose deadline has passed, with its state and what to do."""
    where = {
        RequestStatus.RUNNING: "while it ran",
        RequestStatus.PREEMPTED: "while it waited for KV pages again",
        RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: "while its grammar was being compiled",
        RequestStatus.WAITING_FOR_REMOTE_KVS: "while its KV pages were being fetched",
        RequestStatus.WAITING_FOR_ADAPTER: "while its adapter was being read",
    }
    time = round(request.deadline - request.arrival, 6)  # the clock of a host that runs for days has no finer steps
    return (
        f"the time of {time:g} s that the request was given was up "
        f"{where.get(request.status, 'before it could start')}, after {request.num_output_tokens} tokens; "
        "give it more time, or send it when fewer are waiting"
    )
