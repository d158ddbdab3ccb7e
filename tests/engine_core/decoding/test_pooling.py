"""Requests for embeddings: they end with their prompts, and see the tokens that they need computed, each once."""

from __future__ import annotations

from typing import Literal

import pytest
from paged_executor import Engine, expected_vector

from quire.engine_core.transport.outbox import Outbox, weigh
from quire.protocol.messages import (
    Abort,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorKind,
    EventType,
    FinishReason,
    PoolingParams,
    SamplingParams,
)

PROMPT = list(range(100, 122))  # 5 pages of 4, and 2 tokens

every_type = pytest.mark.parametrize("pooling_type", ["last", "mean"])


@every_type
def test_it_ends_with_its_prompt(pooling_type: Literal["last", "mean"]) -> None:
    engine = Engine(max_num_batched_tokens=10)
    engine.embed("a", PROMPT, pooling_type=pooling_type)
    assert engine.finish() == 3
    end = engine.end("a")
    assert (end.finish_reason, end.pooled) == (FinishReason.STOP, expected_vector(PROMPT, pooling_type))
    assert engine.tokens("a") == []
    assert [event.type for event in end.events] == [EventType.QUEUED, EventType.SCHEDULED, EventType.FINISHED]


@pytest.mark.parametrize(("pooling_type", "computed"), [("last", 2), ("mean", 22)])
def test_pages_that_it_finds_in_the_prefix_cache_and_leaves_there(
    pooling_type: Literal["last", "mean"], computed: int
) -> None:
    engine = Engine()
    engine.embed("first", PROMPT, pooling_type="mean")
    engine.finish()
    engine.embed("a", PROMPT, pooling_type=pooling_type)
    assert engine.step() == {"a": (len(PROMPT) - computed, computed)}
    engine.finish()
    assert engine.end("a").num_cached_tokens == len(PROMPT) - computed
    engine.add("b", PROMPT, max_tokens=1)
    assert engine.step() == {"b": (20, 2)}
    engine.finish()


def test_another_salt_finds_nothing() -> None:
    engine = Engine()
    for name in "ab":
        engine.embed(name, PROMPT, cache_salt=name)
        engine.finish()
        assert engine.end(name).num_cached_tokens == 0


def test_means_of_prompts_that_begin_alike_do_not_wait_for_each_other() -> None:
    engine = Engine(max_num_batched_tokens=100)
    for name in "abcd":
        engine.embed(name, [*PROMPT[:8], ord(name)], pooling_type="mean")
    assert len(engine.step()) == 4
    engine.finish()


@every_type
def test_after_a_preemption_no_state_is_pooled_twice(pooling_type: Literal["last", "mean"]) -> None:
    engine = Engine(num_pages=12, max_num_batched_tokens=3, scheduling_policy="priority")
    engine.expect_no_output()
    engine.add("urgent", [1, 2, 3], max_tokens=40)
    for _ in range(3):
        engine.step()
    engine.embed("a", list(range(32)), pooling_type=pooling_type, priority=1)
    engine.finish()
    end = engine.end("a")
    assert EventType.PREEMPTED in [event.type for event in end.events]
    assert end.pooled == expected_vector(list(range(32)), pooling_type)


def test_an_abort_and_a_timeout_end_it_without_a_vector() -> None:
    engine = Engine(max_num_batched_tokens=4)
    engine.embed("a", PROMPT)
    engine.embed("b", PROMPT[::-1], timeout=1.0)
    engine.step()
    engine.core.receive(b"client", Abort(["a"]))
    engine.now = 2.0
    engine.finish()
    assert (engine.end("a").finish_reason, engine.end("a").pooled) == (FinishReason.ABORT, None)
    assert (engine.end("b").finish_reason, engine.end("b").pooled) == (FinishReason.TIMEOUT, None)


def test_it_may_fill_the_context_and_all_pages() -> None:
    engine = Engine(max_model_len=48, num_pages=12)
    engine.embed("a", [7] * 48)
    engine.finish()
    assert engine.end("a").pooled == expected_vector([7] * 48, "last")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            EngineCoreRequest("r", [7] * 257, SamplingParams()),
            "257 tokens is too long, as this model's maximum context length is 256 tokens; shorten it",
        ),
        (EngineCoreRequest("r", [7], SamplingParams(max_tokens=3)), "leave sampling_params at their defaults"),
        (EngineCoreRequest("r", [7], SamplingParams(), shares_prompt_with="s"), "leave out shares_prompt_with"),
        (EngineCoreRequest("r", [1000], SamplingParams()), "the token id 1000 at position 0"),
        (EngineCoreRequest("r", [7], SamplingParams(), priority=1), "priority=1 has no effect"),
    ],
)
def test_rejected_requests(message: EngineCoreRequest, words: str) -> None:
    engine = Engine()
    message.pooling = PoolingParams()
    engine.core.receive(b"client", message)
    engine.core.flush()
    end = engine.end("r")
    assert words in (end.error or "")
    assert (end.finish_reason, end.error_kind) == (FinishReason.ERROR, ErrorKind.INVALID)


@pytest.mark.parametrize("dimensions", [0, -1, 65])
def test_dimensions_out_of_range(dimensions: int) -> None:
    engine = Engine(hidden_size=64)
    pooling = PoolingParams(dimensions=dimensions)
    engine.core.receive(b"client", EngineCoreRequest("r", [7], SamplingParams(), pooling=pooling))
    engine.core.flush()
    assert f"dimensions={dimensions} is out of range" in (engine.end("r").error or "")
    assert "from 1 to 64" in (engine.end("r").error or "")


def test_a_vector_that_waits_for_its_client_counts_its_memory() -> None:
    outbox = Outbox()
    outbox.put(EngineCoreOutputs([EngineCoreOutput("r", events=[])]))
    end = EngineCoreOutput("r", finish_reason=FinishReason.STOP, pooled=bytes(3600))
    outbox.put(EngineCoreOutputs([end]))
    assert outbox.waiting >= weigh(end) >= 100
    message = outbox.take(10**6)
    assert isinstance(message, EngineCoreOutputs)
    assert [output.pooled for output in message.outputs] == [bytes(3600)]
