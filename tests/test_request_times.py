"""The times of a request are those of the engine, also if a slow client gets merged outputs."""

from __future__ import annotations

from paged_executor import Engine

from quire.engine_core.transport.outbox import Outbox
from quire.frontend.client.observer import DEFAULT_OPTIONS
from quire.frontend.client.request import GenerationRequest
from quire.frontend.sampling import SamplingParams
from quire.frontend.text.prompts import Prompt
from quire.protocol.messages import EngineCoreOutputs


def request_of(engine: Engine, request_id: str, *, merged: bool) -> GenerationRequest:
    """Return the frontend's request after all outputs of the engine, in separate frames or merged in one late frame."""
    frames = [message for message in engine.sent[b"client"] if isinstance(message, EngineCoreOutputs)]
    if merged:
        outbox = Outbox()
        for frame in frames:
            outbox.put(frame)
        late = outbox.take(1_000_000)
        assert isinstance(late, EngineCoreOutputs)
        frames = [late]
    params = SamplingParams(max_tokens=4)
    request = GenerationRequest(
        request_id, Prompt([1, 2, 3]), params, [params], None, arrival_time=0.0, options=DEFAULT_OPTIONS
    )
    for frame in frames:
        for output in frame.outputs:
            if output.request_id == request_id:
                request.append(0, output, frame.timestamp)
    return request


def test_a_merged_frame_has_the_same_times() -> None:
    engine = Engine()
    engine.add("short", [1, 2, 3], max_tokens=4)
    engine.add("long", [4, 5, 6], max_tokens=50)
    while engine.core.has_requests:
        engine.now += 1
        engine.step()
    for request_id, end in (("short", 4), ("long", 50)):
        prompt, late = (request_of(engine, request_id, merged=merged).metrics for merged in (False, True))
        assert prompt == late
        assert (prompt.queued_time, prompt.first_scheduled_time, prompt.first_token_time) == (0, 1, 1)
        assert (prompt.last_token_time, prompt.finished_time) == (end, end)
