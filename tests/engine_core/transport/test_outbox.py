"""The outbox of a slow client: everything arrives, each request ends once, memory follows the tokens."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from quire.engine_core.transport.outbox import NUMBER_BYTES, Outbox, weigh
from quire.protocol.messages import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineGoodbye,
    ErrorMessage,
    EventType,
    FinishReason,
    Pong,
    PrefixReport,
    SchedulerStats,
    TokenLogprobs,
    UtilityResult,
)

IDS = ("a", "b", "c")


def increment(request_id: str, token: int, finish: FinishReason | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id,
        [token],
        [TokenLogprobs([token, 0], [-1.0, -2.0], 1)],
        finish_reason=finish,
        events=[EngineCoreEvent(EventType.SCHEDULED, float(token))],
    )


def drain(outbox: Outbox, max_values: int = 1_000_000) -> list[EngineCoreOutput]:
    outputs = []
    while (message := outbox.take(max_values)) is not None:
        assert isinstance(message, EngineCoreOutputs)
        outputs += message.outputs
    return outputs


@given(
    st.lists(st.one_of(st.sampled_from(IDS), st.none()), max_size=60),
    st.sets(st.sampled_from(IDS)),
    st.integers(1, 100),
)
def test_any_interleaving_delivers_every_token_once_and_in_order(
    steps: list[str | None], ended: set[str], max_values: int
) -> None:
    outbox = Outbox()
    sent: dict[str, list[int]] = defaultdict(list)
    received: list[EngineCoreOutput] = []
    for token, step in enumerate(steps):
        if step is None:
            message = outbox.take(max_values)
            received += message.outputs if isinstance(message, EngineCoreOutputs) else []
        else:
            sent[step].append(token)
            outbox.put(EngineCoreOutputs([increment(step, token)]))
    for request_id in sorted(ended):
        sent[request_id].append(1000)
        outbox.put(EngineCoreOutputs([increment(request_id, 1000, FinishReason.LENGTH)]))
    received += drain(outbox, max_values)
    for request_id, tokens in sent.items():
        outputs = [output for output in received if output.request_id == request_id]
        assert [t for output in outputs for t in output.new_token_ids] == tokens
        assert [e.token_ids[0] for output in outputs for e in output.new_logprobs or ()] == tokens
        assert [e.timestamp for output in outputs for e in output.events] == [float(t) for t in tokens]
        finishes = [output.finish_reason for output in outputs if output.finish_reason is not None]
        assert finishes == ([FinishReason.LENGTH] if request_id in ended else [])
        assert not finishes or outputs[-1].finish_reason is not None
    assert not outbox
    assert outbox.waiting == 0


def test_one_output_a_request_waits() -> None:
    outbox = Outbox()
    merged = sum(outbox.put(EngineCoreOutputs([increment("a", t), increment("b", t)])) for t in range(1000))
    assert merged == 2 * 999
    assert [output.request_id for output in drain(outbox)] == ["a", "b"]


def test_exactly_one_finish_reason_survives() -> None:
    outbox = Outbox()
    outbox.put(EngineCoreOutputs([increment("a", 1)]))
    outbox.put(EngineCoreOutputs([EngineCoreOutput("a", [2], finish_reason=FinishReason.STOP, stop_reason=2)]))
    outbox.put(EngineCoreOutputs([EngineCoreOutput("a", finish_reason=FinishReason.ABORT)]))
    (output,) = drain(outbox)
    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == ([1, 2], FinishReason.STOP, 2)


def test_the_lists_of_a_message_are_not_changed() -> None:
    tokens, events = [1], [EngineCoreEvent(EventType.QUEUED, 0.0)]
    prompt: list[TokenLogprobs | None] = [None]
    first = EngineCoreOutput("a", tokens, None, prompt, events=events)
    outbox = Outbox()
    outbox.put(EngineCoreOutputs([first]))
    outbox.put(EngineCoreOutputs([EngineCoreOutput("a", [2], None, [TokenLogprobs([1], [-1.0], 1)])]))
    (output,) = drain(outbox)
    assert output.new_token_ids == [1, 2]
    assert output.new_prompt_logprobs == [None, TokenLogprobs([1], [-1.0], 1)]
    assert (tokens, prompt, len(events)) == ([1], [None], 1)


def test_a_batch_is_bounded_and_nothing_is_left_behind() -> None:
    outbox = Outbox()
    outputs = [EngineCoreOutput(str(i), [0] * 100) for i in range(50)]
    outbox.put(EngineCoreOutputs(outputs))
    message = outbox.take(1000)
    assert isinstance(message, EngineCoreOutputs)
    assert sum(weigh(output) for output in message.outputs) < 1000 + weigh(outputs[0])
    assert message.outputs + drain(outbox, 1000) == outputs


def test_the_latest_statistics_survive() -> None:
    outbox = Outbox()
    outbox.put(EngineCoreOutputs([], SchedulerStats(step=1), 1.0))
    outbox.put(EngineCoreOutputs([increment("a", 1)], SchedulerStats(step=2), 2.0))
    outbox.put(EngineCoreOutputs([increment("a", 2)], None, 3.0))
    message = outbox.take(1000)
    assert isinstance(message, EngineCoreOutputs)
    assert (message.stats, message.timestamp) == (SchedulerStats(step=2), 3.0)


def test_replies_first_pongs_and_errors_bounded_the_farewell_last() -> None:
    outbox = Outbox()
    outbox.put(EngineGoodbye("over"))
    outbox.put(EngineCoreOutputs([increment("a", 1)]))
    for i in range(100):
        outbox.put(Pong(float(i)))
        outbox.put(ErrorMessage(str(i)))
        outbox.put(UtilityResult(i))
    taken = []
    while (message := outbox.take(1000)) is not None:
        taken.append(message)
    assert [message for message in taken if isinstance(message, Pong)] == [Pong(99.0)]
    assert [m.message for m in taken if isinstance(m, ErrorMessage)] == [str(i) for i in range(84, 100)]
    assert [m.call_id for m in taken if isinstance(m, UtilityResult)] == list(range(100))
    assert isinstance(taken[-2], EngineCoreOutputs)
    assert taken[-1] == EngineGoodbye("over")


def test_a_report_weighs_what_is_in_it() -> None:
    outbox = Outbox()
    report = PrefixReport([(1, "x" * 1000)], [2] * 100, [(1, [3] * 10, [4] * 320)])
    outbox.put(report)
    assert outbox.waiting > 100 + 10 + 320 + 1000 // NUMBER_BYTES
    assert outbox.take(1) is report
    assert outbox.waiting == 0
