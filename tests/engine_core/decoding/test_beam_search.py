"""Beam search over the engine's forks, against one that keeps whole lists and looks at every token."""

from __future__ import annotations

from typing import Any

import pytest
from paged_executor import Engine, distribution

from quire.protocol.messages import Abort, BeamSequence, EventType, FinishReason

VOCAB_SIZE = 40
PROMPT = [7, 1, 30, 12, 5, 5, 9, 22, 3, 14]  # 2 pages of 4, and 2 tokens


def reference(
    width: int,
    max_tokens: int,
    stop: set[int],
    *,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    prompt: list[int] = PROMPT,
) -> list[tuple[float, list[int]]]:
    """The finished sequences and their scores, the best first."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, max_tokens + 1):
        grown = [
            (logprob + more, [*tokens, token])
            for logprob, tokens in live
            for token, more in enumerate(distribution(prompt + tokens, VOCAB_SIZE))
        ]
        grown.sort(key=lambda beam: -beam[0])
        over = [length == max_tokens or tokens[-1] in stop for _, tokens in grown]
        ends = [beam for beam, end in zip(grown[:width], over, strict=False) if end]
        finished += [(logprob / length**length_penalty, tokens) for logprob, tokens in ends]
        finished = sorted(finished, key=lambda beam: -beam[0])[:width]
        live = [beam for beam, end in zip(grown, over, strict=True) if not end][:width]
        if len(finished) == width and live:
            at = max_tokens if early_stopping == "never" and length_penalty > 0 else length
            if early_stopping is True or live[0][0] / at**length_penalty <= finished[-1][0]:
                break
    return finished


def search(engine: Engine, name: str, width: int, stop: set[int] = frozenset(), **options: Any) -> None:  # type: ignore[assignment]
    prompt = options.pop("prompt", PROMPT)
    engine.add(name, prompt, beam_width=width, n=width, stop_token_ids=sorted(stop), **options)


def beams(engine: Engine, name: str) -> list[BeamSequence]:
    found = engine.end(name).beams
    assert found is not None
    return found


def check(engine: Engine, name: str, expected: list[tuple[float, list[int]]], stop: set[int], penalty: float) -> None:
    found = beams(engine, name)
    assert [beam.token_ids for beam in found] == [tokens for _, tokens in expected]
    for beam, (score, tokens) in zip(found, expected, strict=True):
        assert beam.cumulative_logprob / len(tokens) ** penalty == pytest.approx(score)
        assert sum(entry.logprobs[0] for entry in beam.logprobs) == pytest.approx(beam.cumulative_logprob)
        assert (beam.finish_reason is FinishReason.STOP) == (tokens[-1] in stop)
        assert beam.stop_reason == (tokens[-1] if tokens[-1] in stop else None)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_as_the_reference(width: int, length_penalty: float, early_stopping: bool | str) -> None:
    for stop in (set(), {3, 17}):
        options: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        engine = Engine(vocab_size=VOCAB_SIZE)
        search(engine, "a", width, stop, max_tokens=15, **options)
        engine.finish()
        check(engine, "a", reference(width, 15, stop, **options), stop, length_penalty)


def test_an_eos_token_is_no_stop_reason() -> None:
    engine = Engine(vocab_size=VOCAB_SIZE)
    eos = {token for _, tokens in reference(3, 15, {3, 17}) for token in tokens[-1:]} & {3, 17}
    assert eos
    search(engine, "a", 3, {3, 17} - eos, max_tokens=15, eos_token_ids=sorted(eos))
    engine.finish()
    found = beams(engine, "a")
    assert [beam.token_ids for beam in found] == [tokens for _, tokens in reference(3, 15, {3, 17})]
    assert {beam.stop_reason for beam in found} == {None}
    assert engine.end("a").stop_reason is None


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("num_pages", [16, 20, 26])
def test_concurrent_requests_with_few_pages(cache: bool, num_pages: int) -> None:
    """Searches are preempted as a whole, and find the same again."""
    engine = Engine(vocab_size=VOCAB_SIZE, num_pages=num_pages, enable_prefix_caching=cache, max_num_batched_tokens=9)
    engine.expect_no_output()
    for index in range(4):
        search(engine, f"search {index}", 3, {3}, max_tokens=14, prompt=[index, *PROMPT])
        engine.add(f"other {index}", [index] * 6, max_tokens=20)
    engine.finish()
    events = [event.type for index in range(4) for event in engine.end(f"search {index}").events]
    assert EventType.PREEMPTED in events
    for index in range(4):
        expected = reference(3, 14, {3}, prompt=[index, *PROMPT])
        check(engine, f"search {index}", expected, {3}, 1.0)


def test_only_the_pages_where_beams_differ_are_their_own() -> None:
    engine = Engine(vocab_size=VOCAB_SIZE)
    search(engine, "a", 4, max_tokens=30)
    for _ in range(3):
        engine.step()
    assert engine.core.stats.pages_held <= 2 + 4
    engine.core.receive(b"client", Abort(["a"]))
    engine.finish()
    assert engine.end("a").beams is None


def test_it_counts_by_its_width_among_running_requests() -> None:
    engine = Engine(vocab_size=VOCAB_SIZE, max_num_seqs=5)
    search(engine, "a", 4, max_tokens=8)
    search(engine, "b", 4, max_tokens=8)
    engine.add("c", PROMPT[:3], max_tokens=2)
    while engine.core.has_requests:
        engine.step()
        assert sum(request.width for request in engine.core.scheduler.running) <= 5
    engine.finish()
    assert [beam.token_ids for beam in beams(engine, "a")] == [beam.token_ids for beam in beams(engine, "b")]


@pytest.mark.parametrize("with_token", [False, True])
def test_a_beam_that_fails_ends_its_search_alone(with_token: bool) -> None:
    engine = Engine(vocab_size=VOCAB_SIZE)
    search(engine, "a", 3, max_tokens=8)
    search(engine, "b", 3, max_tokens=8)
    for _ in range(3):
        engine.step()
    engine.executor.fail_sequence, engine.executor.fail_with_token = "a", with_token
    engine.finish()
    assert engine.end("a").finish_reason is FinishReason.ERROR
    check(engine, "b", reference(3, 8, set()), set(), 1.0)


def test_a_failed_step_is_computed_again() -> None:
    engine = Engine(vocab_size=VOCAB_SIZE)
    search(engine, "a", 3, max_tokens=8)
    for _ in range(3):
        engine.step()
    engine.executor.fail_step = RuntimeError("out of luck")
    engine.finish()
    check(engine, "a", reference(3, 8, set()), set(), 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 9}, "beam_width=9 is out of range; it must be 0, for no beam search, or from 1 to 8"),
        ({"beam_width": -1}, "beam_width=-1"),
        ({"beam_width": 2, "n": 3}, "n=3 with beam_width=2; it must be from 1 to beam_width"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature=0.7 has no meaning in a beam search"),
        ({"beam_width": 2, "logit_bias": {1: 1.0}}, "logit_bias={1: 1.0} has no meaning"),
        ({"beam_width": 2, "prompt_logprobs": 0}, "prompt_logprobs=0 has no meaning"),
        ({"beam_width": 2, "length_penalty": 11.0}, "length_penalty=11.0 is out of range; it must be from -10 to 10"),
        ({"beam_width": 8, "stop_token_ids": list(range(9))}, "needs 80 continuations a step"),
        ({"beam_width": 8, "max_tokens": 200}, "may need 410 KV pages, and the engine has 100"),
        ({"length_penalty": 2.0}, "belong to a beam search; set beam_width"),
        ({"early_stopping": True}, "belong to a beam search; set beam_width"),
        ({"best_of": 2}, "best_of=2: the engine gives one answer a request"),
    ],
)
def test_rejected_requests(options: dict[str, Any], message: str) -> None:
    engine = Engine(vocab_size=VOCAB_SIZE)
    engine.add("a", PROMPT, **options)
    engine.finish()
    assert message in (engine.end("a").error or "")
