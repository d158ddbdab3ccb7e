"""The scheduler and the step over a page pool without a model."""

from __future__ import annotations

import gc

import pytest
from paged_executor import Engine, FailingSequences, PagedStepResult, expected_tokens

from quire.engine_core.request import Request
from quire.kernels.runner import DeviceLostError
from quire.kernels.step import StepInput
from quire.protocol.messages import (
    Abort,
    EngineCoreOutputs,
    ErrorMessage,
    EventType,
    FinishReason,
    Goodbye,
    UtilityCall,
    UtilityResult,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2]


def answer(prompt: list[int], count: int, seed: int = 0) -> list[int]:
    return expected_tokens(prompt, seed, 1000, count)


def events(engine: Engine, request_id: str) -> list[EventType]:
    return [event.type for output in engine.outputs(request_id) for event in output.events]


def test_a_request_gets_its_tokens_and_one_end() -> None:
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=5)
    assert engine.finish() == 5
    assert engine.tokens("a") == answer(PROMPT, 5)
    assert engine.end("a").finish_reason is FinishReason.LENGTH
    assert events(engine, "a") == [EventType.QUEUED, EventType.SCHEDULED, EventType.FIRST_TOKEN, EventType.FINISHED]


def test_without_max_tokens_the_context_is_the_limit() -> None:
    engine = Engine(max_model_len=40)
    engine.add("a", PROMPT, max_tokens=None)
    engine.finish()
    assert engine.tokens("a") == answer(PROMPT, 33)
    assert engine.end("a").finish_reason is FinishReason.LENGTH


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.add("short", [1], max_tokens=10)
    engine.add("long", list(range(2, 42)), max_tokens=2)
    assert engine.step() == {"short": (0, 1), "long": (0, 12)}  # pages of 4 are filled
    assert engine.step() == {"short": (1, 1), "long": (12, 12)}
    assert engine.step() == {"short": (2, 1), "long": (24, 12)}
    assert engine.step() == {"short": (3, 1), "long": (36, 4)}
    assert engine.step() == {"short": (4, 1), "long": (40, 1)}
    engine.finish()
    assert engine.tokens("short") == answer([1], 10)
    assert engine.tokens("long") == answer(list(range(2, 42)), 2)


def test_the_rest_of_the_budget_goes_to_the_next_prompt() -> None:
    engine = Engine(max_num_batched_tokens=16)
    for index, name in enumerate("abc"):
        engine.add(name, [index] * 10, max_tokens=1)
    assert engine.step() == {"a": (0, 10), "b": (0, 4), "c": (0, 2)}
    assert engine.step() == {"b": (4, 6), "c": (2, 8)}


def test_no_more_requests_run_than_a_step_has_tokens() -> None:
    engine = Engine(max_num_batched_tokens=3)
    for name in "abcde":
        engine.add(name, [7], max_tokens=4)
    assert set(engine.step()) == {"a", "b", "c"}
    assert set(engine.step()) == {"a", "b", "c"}
    engine.finish()
    assert engine.tokens("e") == answer([7], 4)


def test_no_more_requests_run_than_max_num_seqs() -> None:
    engine = Engine(max_num_seqs=2)
    for name in "abc":
        engine.add(name, [7], max_tokens=2)
    assert set(engine.step()) == {"a", "b"}
    engine.step()
    assert set(engine.step()) == {"c"}


def test_first_come_first_served_even_if_a_later_one_would_fit() -> None:
    engine = Engine(num_pages=10)
    engine.add("running", [1] * 20, max_tokens=10)
    engine.add("large", [2] * 24, max_tokens=1)
    engine.add("small", [3], max_tokens=1)
    assert set(engine.step()) == {"running"}
    engine.finish()
    first_step = {name: index for index, step in reversed([*enumerate(engine.executor.steps)]) for name in step}
    assert first_step["running"] < first_step["large"] <= first_step["small"]


def test_a_preempted_request_resumes_with_the_same_tokens() -> None:
    engine = Engine(num_pages=14)
    engine.expect_no_output()
    for index, name in enumerate("abc"):
        engine.add(name, [index] * 8, max_tokens=40, seed=index)
    engine.finish()
    assert engine.core.stats.preemptions > 0
    for index, name in enumerate("abc"):
        assert engine.tokens(name) == answer([index] * 8, 40, seed=index)
        assert engine.end(name).finish_reason is FinishReason.LENGTH
        received = events(engine, name)
        received.remove(EventType.FIRST_TOKEN)
        pairs = [EventType.PREEMPTED, EventType.SCHEDULED] * ((len(received) - 3) // 2)
        assert received == [EventType.QUEUED, EventType.SCHEDULED, *pairs, EventType.FINISHED]


def test_the_victim_was_not_preempted_before_and_has_the_fewest_pages() -> None:
    engine = Engine(num_pages=20)
    engine.expect_no_output()
    for index, length in enumerate((12, 4, 8)):
        engine.add(str(length), [index] * length, max_tokens=40)
    victims: list[str] = []
    scheduler = engine.core.scheduler
    preempt = scheduler._requests.preempt

    def note(request: Request, now: float) -> None:
        others = [other for other in scheduler.running if other is not request]
        assert all(request.num_preemptions <= other.num_preemptions for other in others)
        victims.append(request.request_id)
        preempt(request, now)

    scheduler._requests.preempt = note  # type: ignore[method-assign]
    engine.finish()
    assert victims[:2] == ["4", "8"]
    for index, length in enumerate((12, 4, 8)):
        assert engine.tokens(str(length)) == answer([index] * length, 40)


def test_a_prompt_that_can_never_fit_is_rejected_at_once() -> None:
    engine = Engine(num_pages=5)
    engine.add("a", [1] * 20, max_tokens=1)
    engine.step()
    end = engine.end("a")
    assert end.finish_reason is FinishReason.ERROR
    assert end.error == (
        "a prompt of 20 tokens can never be served: the engine's 5 KV pages hold 20 tokens; "
        "shorten it to 19 tokens or fewer, or start the engine with more KV memory"
    )
    engine.finish()


def test_a_lone_request_that_outgrows_the_pool_ends_with_an_error() -> None:
    engine = Engine(num_pages=5)
    engine.add("a", [1] * 16, max_tokens=100)
    engine.add("b", [1] * 16, max_tokens=5)
    engine.finish(max_steps=20)
    assert engine.tokens("a") == answer([1] * 16, 5)
    assert engine.end("a").finish_reason is FinishReason.ERROR
    assert "lower max_tokens to 5 or less" in (engine.end("a").error or "")
    assert engine.tokens("b") == answer([1] * 16, 5)
    assert engine.end("b").finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_eos_token_ends_a_request_unless_it_is_ignored(ignore_eos: bool) -> None:
    engine = Engine()
    tokens = answer(PROMPT, 8)
    engine.add("a", PROMPT, max_tokens=8, eos_token_ids=[tokens[2]], ignore_eos=ignore_eos)
    engine.finish()
    end = engine.end("a")
    assert engine.tokens("a") == (tokens if ignore_eos else tokens[:3])
    assert (end.finish_reason, end.stop_reason) == (FinishReason.LENGTH if ignore_eos else FinishReason.STOP, None)


def test_a_stop_token_is_named_and_counts_before_the_length() -> None:
    engine = Engine()
    tokens = answer(PROMPT, 3)
    engine.add("a", PROMPT, max_tokens=3, stop_token_ids=[tokens[2]])
    engine.finish()
    assert engine.tokens("a") == tokens
    assert (engine.end("a").finish_reason, engine.end("a").stop_reason) == (FinishReason.STOP, tokens[2])


def test_only_requests_with_logprobs_get_them() -> None:
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=3)
    engine.add("b", PROMPT, max_tokens=3, logprobs=0)
    engine.finish()
    assert all(output.new_logprobs is None for output in engine.outputs("a"))
    received = [entry for output in engine.outputs("b") for entry in output.new_logprobs or []]
    assert [entry.token_ids for entry in received] == [[token] for token in answer(PROMPT, 3)]


@pytest.mark.parametrize(("tokens_a_step", "num_pages"), [(5, 100), (5, 8), (2, 9)])
def test_prompt_logprobs_come_once_and_whole_whatever_the_chunks(tokens_a_step: int, num_pages: int) -> None:
    """Request "b" is preempted with 8 pages while it decodes, with 9 and small chunks amid its prompt."""
    engine = Engine(max_num_batched_tokens=tokens_a_step, num_pages=num_pages)
    engine.expect_no_output()
    prompt = list(range(17))
    engine.add("a", [9] * 5, max_tokens=20)
    engine.add("b", prompt, max_tokens=12, prompt_logprobs=0)
    engine.finish()
    assert bool(engine.core.stats.preemptions) == (num_pages < 100)
    received = [output.new_prompt_logprobs for output in engine.outputs("b") if output.new_prompt_logprobs is not None]
    assert len(received) == 1
    assert [entry and entry.token_ids for entry in received[0]] == [None] + [[token] for token in prompt[1:]]
    assert engine.tokens("b") == answer(prompt, 12)


def test_one_sequence_that_fails_leaves_the_others_unharmed() -> None:
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=5)
    engine.add("b", PROMPT, max_tokens=5)
    engine.step()
    engine.executor.fail_sequence = "a"
    engine.finish()
    assert engine.tokens("a") == answer(PROMPT, 1)
    assert (engine.end("a").finish_reason, engine.end("a").error) == (FinishReason.ERROR, "the logits are not a number")
    assert engine.tokens("b") == answer(PROMPT, 5)


@pytest.mark.parametrize("max_tokens", [2, 5])
def test_a_sequence_that_fails_ends_once_even_if_a_token_comes_with_the_error(max_tokens: int) -> None:
    """The token would be its last with max_tokens=2."""
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=max_tokens)
    engine.add("b", PROMPT, max_tokens=5)
    engine.step()
    engine.executor.fail_sequence, engine.executor.fail_with_token = "a", True
    engine.finish()
    assert engine.tokens("a") == answer(PROMPT, 1)
    assert (engine.end("a").finish_reason, engine.end("a").error) == (FinishReason.ERROR, "the logits are not a number")
    assert engine.tokens("b") == answer(PROMPT, 5)


def test_a_request_shows_itself_in_a_line_however_long_it_is() -> None:
    engine = Engine(max_model_len=20_000, num_pages=10_000)
    engine.add("a", [7] * 10_000, max_tokens=5, logit_bias=dict.fromkeys(range(500), 1.0), prompt_logprobs=1)
    engine.step()
    [request] = engine.core.scheduler.running
    assert "request_id='a'" in repr(request)
    assert len(repr(request)) < 500


def test_a_request_that_breaks_steps_of_its_own_ends_only_itself() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", PROMPT, max_tokens=5)
    engine.add("b", PROMPT, max_tokens=5)
    engine.executor.poison = "a"
    engine.finish()
    assert "failed to compute this step: poisoned" in (engine.end("a").error or "")
    assert engine.tokens("b") == answer(PROMPT, 5)


@pytest.mark.parametrize("position", range(7))
def test_a_request_that_breaks_its_steps_ends_alone(position: int) -> None:
    engine = Engine(num_pages=200)
    names = [f"r{number}" for number in range(7)]
    for number, name in enumerate(names):
        engine.add(
            name, [number + 1, *PROMPT], max_tokens=6 + number, n=2 if number == 3 else 1, beam_width=2 * (number == 3)
        )
    engine.step()
    engine.step()
    engine.executor.poison = names[position]
    engine.finish()
    for number, name in enumerate(names):
        if number == position:
            assert "failed to compute this step: poisoned" in (engine.end(name).error or "")
        elif number != 3:
            assert engine.tokens(name) == answer([number + 1, *PROMPT], 6 + number)
        else:
            assert engine.end(name).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("count", [1, 5])
def test_a_step_that_fails_once_costs_nobody_anything(count: int) -> None:
    engine = Engine()
    for number in range(count):
        engine.add(str(number), [number + 1, *PROMPT], max_tokens=6)
    engine.step()
    engine.executor.fail_step = RuntimeError("a cosmic ray")
    engine.finish()
    assert [engine.tokens(str(number)) for number in range(count)] == [
        answer([n + 1, *PROMPT], 6) for n in range(count)
    ]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("a cosmic ray")])
def test_under_a_supervisor_a_step_fails_that_another_process_can_compute(error: Exception) -> None:
    engine = Engine(is_supervised=True)
    for number in range(3):
        engine.add(str(number), [number + 1, *PROMPT], max_tokens=6, prompt_logprobs=1)
    engine.executor.fail_step = error
    with pytest.raises(type(error)):
        engine.step()
    engine.core.flush()
    assert not any(engine.outputs(str(number)) for number in range(3))


@pytest.mark.parametrize("is_supervised", [False, True])
def test_an_engine_ends_with_its_gpu(is_supervised: bool) -> None:
    engine = Engine(is_supervised=is_supervised)
    engine.add("a", PROMPT, max_tokens=6)
    engine.executor.fail_step = DeviceLostError("the GPU is lost")
    with pytest.raises(DeviceLostError):
        engine.step()


@pytest.mark.parametrize("is_supervised", [False, True])
def test_a_failed_step_is_not_computed_again_from_states_that_it_has_rewritten(is_supervised: bool) -> None:
    engine = Engine(is_supervised=is_supervised)
    for number in range(3):
        engine.add(str(number), [number + 1, *PROMPT], max_tokens=6)
    engine.step()
    engine.executor.fail_step, engine.executor.loses_states = RuntimeError("a cosmic ray"), True
    if is_supervised:
        with pytest.raises(RuntimeError, match="a cosmic ray"):
            engine.step()
        return
    engine.finish()
    assert all("a cosmic ray" in (engine.end(str(number)).error or "") for number in range(3))


def test_a_request_that_the_executor_rejects_ends_with_its_error() -> None:
    engine = Engine()
    assert isinstance(engine.executor.sequences, FailingSequences)
    engine.executor.sequences.fail_open = "this cannot be sampled"
    engine.add("a", PROMPT, max_tokens=5)
    engine.add("b", PROMPT, max_tokens=5)
    engine.finish()
    assert engine.end("a").error == "this cannot be sampled"
    assert engine.tokens("b") == answer(PROMPT, 5)


def test_abort_ends_waiting_and_running_requests_and_ignores_others() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("running", PROMPT, max_tokens=5)
    engine.add("waiting", PROMPT, max_tokens=5)
    engine.add("other", PROMPT, max_tokens=5)
    engine.step()
    engine.core.receive(b"client", Abort(["running", "waiting", "unknown"]))
    engine.core.receive(b"stranger", Abort(["other"]))
    engine.finish()
    assert engine.end("running").finish_reason is FinishReason.ABORT
    assert engine.end("waiting").finish_reason is FinishReason.ABORT
    assert engine.tokens("other") == answer(PROMPT, 5)


def test_clients_may_use_the_same_request_id() -> None:
    engine = Engine()
    engine.add("a", [1], b"one", max_tokens=4)
    engine.add("a", [2], b"two", max_tokens=4)
    engine.step()
    engine.core.receive(b"one", Goodbye())
    engine.finish()
    assert engine.end("a", b"one").finish_reason is FinishReason.ABORT
    assert engine.tokens("a", b"two") == answer([2], 4)


def test_a_request_id_in_use_is_rejected_without_harm_to_its_owner() -> None:
    engine = Engine()
    engine.add("a", [1], max_tokens=4)
    engine.add("a", [2], max_tokens=4)
    engine.finish()
    errors = [message for message in engine.sent[b"client"] if isinstance(message, ErrorMessage)]
    assert [error.message for error in errors] == [
        "request_id 'a' is in use by a request that has not ended; choose another id"
    ]
    assert engine.tokens("a") == answer([1], 4)
    engine.add("a", [2], max_tokens=4)  # free again
    engine.finish()
    assert len(engine.outputs("a")) == 8


def test_a_rejection_does_not_wait_for_the_step() -> None:
    engine = Engine()
    engine.add("good", [1], max_tokens=1)
    engine.add("bad", [], max_tokens=1)
    sent_before_the_step: list[int] = []
    execute = engine.executor.submit

    def watch(step: StepInput) -> PagedStepResult:
        sent_before_the_step.append(len(engine.outputs("bad")))
        return execute(step)

    engine.executor.submit = watch  # type: ignore[method-assign]
    engine.step()
    assert sent_before_the_step == [1]


def test_a_draining_engine_finishes_open_requests_and_rejects_new_ones() -> None:
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=4)
    engine.core.receive(b"client", UtilityCall(1, "shutdown"))
    engine.add("b", PROMPT, max_tokens=4)
    engine.finish()
    assert engine.tokens("a") == answer(PROMPT, 4)
    assert "shutting down" in (engine.end("b").error or "")


def test_end_all_ends_every_request() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", PROMPT, b"one", max_tokens=4)
    engine.add("b", PROMPT, b"two", max_tokens=4)
    engine.step()
    engine.core.end_all("the engine failed")
    assert (engine.end("a", b"one").finish_reason, engine.end("b", b"two").error) == (
        FinishReason.ERROR,
        "the engine failed",
    )
    assert engine.executor.sequences.held_pages == 0


def test_utility_calls_are_answered() -> None:
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=4)
    engine.step()
    for call_id, method in enumerate(["stats", "reset_cache", "dance"]):
        engine.core.receive(b"client", UtilityCall(call_id, method))
    stats, reset, dance = [m for m in engine.sent[b"client"] if isinstance(m, UtilityResult)]
    assert (stats.result["running"], stats.result["pages_held"], stats.result["pages_total"]) == (1, 2, 100)
    assert (reset.result, reset.error) == (0, None)
    calls = (
        "stats, reset_cache, pin_prefix, unpin_prefix, snapshot, prefix_tree, reload, shutdown, trace_start, trace_stop"
    )
    assert dance.error == f"there is no utility call 'dance'; there are {calls}"


def test_statistics_split_prefill_and_decode_and_account_for_all_pages() -> None:
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=3)
    engine.step()
    engine.add("b", [1], max_tokens=3)
    engine.step()
    messages = [m for m in engine.sent[b"client"] if isinstance(m, EngineCoreOutputs)]
    received = [message.stats for message in messages if message.stats is not None]
    assert [(stats.step, stats.prefill_tokens, stats.decode_tokens) for stats in received] == [(1, 7, 0), (2, 1, 1)]
    assert all(s.pages_free + s.pages_cached + s.pages_held == s.pages_total for s in received)


def test_a_request_without_a_seed_is_given_one() -> None:
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=4, seed=None)
    engine.add("b", PROMPT, max_tokens=4, seed=None)
    engine.finish()
    assert engine.tokens("a") != engine.tokens("b")


def test_requests_leave_no_garbage_for_the_collector() -> None:
    engine = Engine(num_pages=14)
    engine.expect_no_output()
    gc.collect()
    gc.disable()
    try:
        for index in range(50):
            engine.add(str(index), [index] * 8, max_tokens=20, prompt_logprobs=0)
            engine.add("bad", [], max_tokens=20)
        engine.finish()
        engine.sent.clear()
        assert engine.core.stats.preemptions > 0
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_steps_of_a_single_tile_serve_the_shorter_prompt_first_and_the_oldest_a_little() -> None:
    engine = Engine(max_num_batched_tokens=4)
    engine.add("long", [1] * 40, max_tokens=1)
    assert engine.step() == {"long": (0, 4)}
    for index in range(6):
        engine.add(str(index), [2 + index] * 8, max_tokens=1)
    engine.finish()
    steps = engine.executor.steps
    assert steps[1] == {"0": (0, 3), "long": (4, 1)}
    assert all("long" in step for step in steps)
    assert max(index for index, step in enumerate(steps) if "5" in step) < len(steps) - 4
    assert engine.tokens("long") == answer([1] * 40, 1)
