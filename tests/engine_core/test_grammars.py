"""Requests that wait for their grammar, and what rules them then; llguidance is real, the model is not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from paged_executor import Engine, allowed_tokens

from quire.engine_core import constraint
from quire.engine_core import grammars as module
from quire.engine_core.constraint import Constraint
from quire.engine_core.grammar_tokenizer import GrammarTokenizer
from quire.engine_core.grammars import Grammar, Grammars
from quire.engine_core.policies import POLICIES
from quire.engine_core.request import RequestStatus
from quire.protocol.messages import Abort, ErrorKind, FinishReason, Goodbye, StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher

EOS = 4
WAITS = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
DATE = StructuredOutputs(regex=r"\d{4}-\d\d-\d\d")


class Gate:
    """Compiles as ever, but only what it is told to let through."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._compile = Grammars(tokenizer, timeout=1.0)._compile_matcher
        self._open = threading.Event()
        self.begun: list[str] = []
        self.has_begun = threading.Event()

    def open(self) -> None:
        self._open.set()

    def __call__(self, structured: StructuredOutputs) -> LLMatcher:
        self.begun.append(str(structured.regex))
        self.has_begun.set()
        self._open.wait(60)
        return self._compile(structured)


_BENCHES: list[Bench] = []


class Bench:
    """An engine with grammars, and what wakes its loop."""

    def __init__(
        self, tokenizer: GrammarTokenizer, timeout: float = 60.0, *, is_open: bool = False, **limits: Any
    ) -> None:
        self.gate = Gate(tokenizer)
        if is_open:
            self.gate.open()
        self.woken = threading.Semaphore(0)
        self.grammars = Grammars(tokenizer, timeout=timeout, wake=self.woken.release, compile_grammar=self.gate)
        self.engine = Engine(self.grammars, **{"vocab_size": 2048, "num_pages": 200, **limits})
        _BENCHES.append(self)

    def add(
        self, name: str, structured: StructuredOutputs = DATE, prompt: tuple[int, ...] = (1, 2, 3), **more: Any
    ) -> None:
        more = {"eos_token_ids": [EOS], "max_tokens": 40, **more}
        self.engine.add(name, list(prompt), structured_outputs=structured, **more)

    def status(self, name: str) -> RequestStatus:
        return self.engine.core._requests[b"client"][name].status

    def finish(self) -> int:
        """Steps until nothing is left, sleeping as the loop does."""
        steps = 0
        while self.engine.core.has_requests:
            if not self.engine.core.has_work:
                assert self.woken.acquire(timeout=60)
            self.engine.step()
            steps += 1
        self.engine.finish()
        return steps


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    yield
    while _BENCHES:
        bench = _BENCHES.pop()
        bench.gate.open()
        assert bench.engine.core.stop()


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> GrammarTokenizer:
    return GrammarTokenizer(str(demo_model))


@pytest.fixture
def text_of(tokenizer: GrammarTokenizer) -> Callable[[list[int]], str]:
    return lambda token_ids: tokenizer.get().decode_str([token for token in token_ids if token != EOS])


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_waits_for_a_grammar_that_is_not_his(
    tokenizer: GrammarTokenizer, text_of: Callable[[list[int]], str], policy: str
) -> None:
    bench = Bench(tokenizer, policy=policy)
    bench.add("slow")
    assert bench.status("slow") is WAITS
    for name in "abc":
        bench.engine.add(name, [5, 6, 7], max_tokens=4)
    assert bench.engine.core.stats.waiting == 4
    while bench.engine.core.has_work:
        bench.engine.step()
    assert all(bench.engine.end(name).finish_reason is FinishReason.LENGTH for name in "abc")
    assert bench.status("slow") is WAITS
    assert bench.engine.core.has_requests
    assert bench.engine.core.stats.waiting == 1
    bench.gate.open()
    bench.finish()
    assert len(text_of(bench.engine.tokens("slow"))) == len("2025-01-01")
    assert bench.engine.end("slow").finish_reason is FinishReason.STOP
    assert bench.engine.end("slow").is_whole


def test_a_grammar_is_compiled_once(tokenizer: GrammarTokenizer) -> None:
    bench = Bench(tokenizer, is_open=True)
    for index in range(3):
        bench.add(str(index))
    bench.finish()
    bench.add("later", seed=5)
    assert bench.status("later") is RequestStatus.WAITING
    bench.finish()
    bench.add("other", StructuredOutputs(regex="x+y"))
    assert bench.status("other") is WAITS
    bench.finish()
    assert bench.gate.begun == [DATE.regex, "x+y"]
    assert bench.engine.tokens("0") == bench.engine.tokens("1") == bench.engine.tokens("2")


@pytest.mark.parametrize("leave", [Abort(["a"]), Goodbye()])
def test_who_leaves_while_it_is_compiled_leaves_nothing(tokenizer: GrammarTokenizer, leave: Abort | Goodbye) -> None:
    bench = Bench(tokenizer)
    bench.add("a")
    assert bench.gate.has_begun.wait(60)
    bench.engine.core.receive(b"client", leave)
    assert bench.engine.end_now("a").finish_reason is FinishReason.ABORT
    assert not bench.engine.core.has_requests
    bench.gate.open()
    assert bench.woken.acquire(timeout=60)
    bench.engine.step()
    assert not bench.grammars.is_compiling
    assert bench.engine.core.stats.waiting == 0
    bench.add("b")  # what was begun is not lost
    assert bench.status("b") is RequestStatus.WAITING
    bench.finish()


def test_what_nobody_wants_any_more_is_not_begun(tokenizer: GrammarTokenizer) -> None:
    bench = Bench(tokenizer)
    bench.add("a")
    bench.add("b", StructuredOutputs(regex="b+"))
    bench.add("c", StructuredOutputs(regex="c{3}"))
    bench.engine.core.receive(b"client", Abort(["b"]))
    bench.gate.open()
    bench.finish()
    assert bench.gate.begun == [DATE.regex, "c{3}"]


def test_siblings_wait_together_and_share_the_prompt(tokenizer: GrammarTokenizer) -> None:
    bench = Bench(tokenizer, enable_prefix_caching=False)
    prompt = tuple(range(10, 40))
    for index in range(4):
        bench.add(str(index), prompt=prompt, seed=index, sibling="0" if index else None)
    bench.engine.core.receive(b"client", Abort(["0"]))
    bench.gate.open()
    bench.finish()
    assert bench.engine.executor.num_forks == 2
    assert [bench.engine.end(name).finish_reason for name in "123"] == [FinishReason.STOP] * 3


def test_those_who_wait_for_grammars_fill_the_queue(tokenizer: GrammarTokenizer) -> None:
    bench = Bench(tokenizer, max_waiting_requests=2)
    for name in "abc":
        bench.add(name)
    bench.engine.core.flush()
    assert bench.engine.end("c").error_kind is ErrorKind.OVERLOADED
    bench.gate.open()
    bench.finish()


def test_time_is_up_while_it_is_compiled(tokenizer: GrammarTokenizer) -> None:
    bench = Bench(tokenizer)
    bench.add("a", timeout=5.0)
    bench.engine.now = 6.0
    bench.engine.step()
    end = bench.engine.end_now("a")
    assert end.finish_reason is FinishReason.TIMEOUT
    assert "while its grammar was being compiled" in (end.error or "")
    bench.gate.open()


def test_an_engine_that_drains_lets_them_end(tokenizer: GrammarTokenizer) -> None:
    bench = Bench(tokenizer)
    bench.add("a")
    bench.engine.core.draining = True
    bench.add("b")
    bench.gate.open()
    bench.finish()
    assert bench.engine.end("a").finish_reason is FinishReason.STOP
    assert bench.engine.end("b").error_kind is ErrorKind.SHUTTING_DOWN


def test_a_grammar_that_takes_too_long(tokenizer: GrammarTokenizer) -> None:
    """Also while it is still being compiled; the next one has a thread of its own then."""
    bench = Bench(tokenizer, timeout=1e-9)
    bench.add("a")
    bench.add("b", StructuredOutputs(regex="b+"))
    while len(bench.gate.begun) < 2:
        bench.engine.step()
    bench.engine.step()
    bench.gate.open()
    while bench.engine.core.has_requests:
        bench.engine.step()
    for name in "ab":
        end = bench.engine.end_now(name)
        assert end.finish_reason is FinishReason.ERROR
        assert end.error_kind is ErrorKind.INVALID
        assert "--grammar-timeout" in (end.error or "")


def test_no_more_threads_than_a_few_are_stuck(tokenizer: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes then is not begun with, and waits no longer than the others."""
    monkeypatch.setattr(module, "_MOST_STUCK", 1)
    bench = Bench(tokenizer, timeout=1e-9)
    bench.add("a")
    bench.add("b", StructuredOutputs(regex="b+"))
    while bench.engine.core.has_requests:
        bench.engine.step()
    assert [bench.engine.end_now(name).finish_reason for name in "ab"] == [FinishReason.ERROR] * 2
    assert bench.gate.begun == [DATE.regex]
    bench.gate.open()


def test_the_oldest_grammars_are_forgotten(tokenizer: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_GRAMMARS", 2)
    bench = Bench(tokenizer, is_open=True)
    for regex in ("a{3}", "b{3}", "a{3}", "c{3}", "a{3}", "b{3}"):
        bench.add(regex, StructuredOutputs(regex=regex))
        bench.finish()
    assert bench.gate.begun == ["a{3}", "b{3}", "c{3}", "b{3}"]


def test_forced_tokens_are_not_drawn(tokenizer: GrammarTokenizer, text_of: Callable[[list[int]], str]) -> None:
    """They come in one output with the token that they follow, and are computed as a chunk."""
    text = "the quick brown fox jumps over the lazy dog"
    bench = Bench(tokenizer, is_open=True)
    bench.add("a", StructuredOutputs(choice=["a " + text, "b " + text]))
    steps = bench.finish()
    bench.add("b", StructuredOutputs(choice=["a " + text, "b " + text]), logprobs=0)
    bench.finish()
    tokens = bench.engine.tokens("a")
    assert text_of(tokens) in ("a " + text, "b " + text)
    assert tokens == bench.engine.tokens("b")
    assert steps < len(tokens) / 2
    assert any(len(output.new_token_ids) > 5 for output in bench.engine.outputs("a"))
    assert all(len(output.new_token_ids) == 1 for output in bench.engine.outputs("b"))


def test_no_token_is_forced_that_the_model_lacks(tokenizer: GrammarTokenizer) -> None:
    """The tokenizer has 2,048 of them."""
    [first] = tokenizer.get().tokenize_str("x")
    grammars = Grammars(tokenizer, timeout=60.0)
    grammar = Grammar(("choice", "", False, None), StructuredOutputs())
    grammar.matcher = grammars._compile_matcher(StructuredOutputs(choice=["x the quick brown fox"]))
    forced = []
    for vocab_size in (2048, 300):
        constraint = grammars.constrain(grammar, vocab_size, [EOS])
        constraint.follow(first)
        forced.append(list(constraint.forced))
        assert constraint.error is None
    assert max(forced[0]) >= 300 > max(forced[1], default=0)
    assert forced[0][: len(forced[1])] == forced[1]


@pytest.mark.parametrize("max_tokens", range(1, 20))
def test_no_more_forced_tokens_than_were_asked_for(tokenizer: GrammarTokenizer, max_tokens: int) -> None:
    structured = StructuredOutputs(choice=["it was a dark night"])
    bench = Bench(tokenizer, is_open=True, max_num_batched_tokens=4)
    bench.add("all", structured)
    bench.add("some", structured, max_tokens=max_tokens)
    bench.finish()
    whole = bench.engine.tokens("all")
    assert bench.engine.tokens("some") == whole[:max_tokens]
    is_whole = max_tokens >= len(whole)
    assert bench.engine.end("some").finish_reason is (FinishReason.STOP if is_whole else FinishReason.LENGTH)


@pytest.mark.parametrize("num_pages", [12, 16, 24])
def test_a_preempted_request_goes_on_where_it_was(tokenizer: GrammarTokenizer, num_pages: int) -> None:
    answers = []
    for pages in (200, num_pages):
        bench = Bench(tokenizer, is_open=True, num_pages=pages)
        bench.engine.expect_no_output()
        for index in range(6):
            structured = StructuredOutputs(regex="(the end, my friend; |no[a-z]*[.] ){4,}")
            bench.add(str(index), structured, seed=index, prompt=(index, 7, 9), max_tokens=30)
        bench.finish()
        answers.append([bench.engine.tokens(str(index)) for index in range(6)])
    assert bench.engine.core.stats.preemptions > 0
    assert answers[0] == answers[1]


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("structured", [DATE, StructuredOutputs(regex="([a-z]{1,9} ){9}"), StructuredOutputs(json={})])
def test_what_is_drawn_ahead_of_its_mask_is_what_the_mask_would_allow(
    tokenizer: GrammarTokenizer, structured: StructuredOutputs, ignore_eos: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for most_seconds in (0.0, 60.0):
        monkeypatch.setattr(constraint, "_MOST_GUESS_SECONDS", most_seconds)
        bench = Bench(tokenizer, is_open=True)
        for seed in range(6):
            bench.add(str(seed), structured, seed=seed, ignore_eos=ignore_eos)
        bench.finish()
        found.append([bench.engine.tokens(str(seed)) for seed in range(6)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "regex", [r"\d{4}-\d\d", "([a-z]{1,9} ){3,9}", r'\{"[^"\\]{2,60}": (true|[0-9]+)\}', "(ab|abc|é€)+"]
)
@pytest.mark.parametrize("stop_token_ids", [[EOS], []])
def test_a_token_is_taken_as_the_mask_has_it(
    tokenizer: GrammarTokenizer, regex: str, stop_token_ids: list[int]
) -> None:
    """Of all tokens; a refused one leaves everything as it was. Of an eos that does not stop only the mask can tell."""
    native, random = tokenizer.get(), Random(regex)
    matcher = Grammars(tokenizer, timeout=60)._compile_matcher(StructuredOutputs(regex=regex))
    num_taken = 0
    for _ in range(12):
        ruled = Constraint(matcher.deep_copy(), native, native.vocab_size, stop_token_ids)
        ruled.begin_mask()
        ruled.write_mask()
        allowed = set(allowed_tokens(ruled.mask))
        banned = [token for token in range(native.vocab_size + 9) if token not in allowed]
        assert not any(map(ruled.take, banned))
        for token in random.sample(sorted(allowed), min(9, len(allowed))):
            other = Constraint(matcher.deep_copy(), native, native.vocab_size, stop_token_ids)
            assert not any(map(other.take, banned[:2]))
            assert other.take(token) == (token != EOS or bool(stop_token_ids))
            num_taken += 1
        if not (going_on := sorted(allowed - {EOS})):
            break
        assert matcher.consume_token(random.choice(going_on))
    assert num_taken > 5


@pytest.mark.parametrize(("grammar", "allowed"), [('start: ("a" | <|end|>) "b"', "a"), ('start: <|end|> "b"', None)])
def test_an_eos_that_the_text_may_have_and_that_does_not_stop(
    tokenizer: GrammarTokenizer, grammar: str, allowed: str | None
) -> None:
    """It comes only where nothing else may, by a mask and ahead of it."""
    native = tokenizer.get()
    matcher = Grammars(tokenizer, timeout=60)._compile_matcher(StructuredOutputs(grammar=grammar))
    ruled = Constraint(matcher, native, native.vocab_size, [])
    ruled.begin_mask()
    ruled.write_mask()
    assert allowed_tokens(ruled.mask) == ([EOS] if allowed is None else native.tokenize_str(allowed))
    assert not ruled.take(EOS)  # only the mask can tell


@pytest.mark.parametrize("num_late", [1, 2, 5, 40])
def test_a_late_mask_changes_no_token(tokenizer: GrammarTokenizer, num_late: int) -> None:
    """Whether its sequence is in prefill or decodes; its last token is computed again."""
    bench = Bench(tokenizer, is_open=True)
    structured = StructuredOutputs(regex="(the end, my friend; |no[a-z]*[.] ){4,}")
    answers = []
    for late in (0, num_late):
        bench.engine.executor.num_late_masks = late
        for index in range(3):
            bench.add(f"{late} {index}", structured, seed=index, prompt=tuple(range(index, 9)), max_tokens=12)
        bench.finish()
        answers.append([bench.engine.tokens(f"{late} {index}") for index in range(3)])
    assert answers[0] == answers[1]
    assert bench.engine.executor.num_late_masks == 0


def test_threads_end_with_the_engine_unless_they_are_stuck(
    tokenizer: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine_core.constrained._STOP_SECONDS", 0.0)
    bench = Bench(tokenizer)
    bench.add("a")
    bench.add("b", StructuredOutputs(regex="b+"))
    assert bench.gate.has_begun.wait(60)
    assert not bench.engine.core.stop()
    bench.gate.open()
    monkeypatch.setattr("quire.engine_core.constrained._STOP_SECONDS", 60.0)
    assert bench.engine.core.stop()
    assert len(bench.gate.begun) == 1
    bench.engine.core.end_all()


def test_an_engine_without_grammars_says_so() -> None:
    engine = Engine()
    engine.add("a", [1], structured_outputs=DATE)
    engine.finish()
    assert "knows no grammars" in (engine.end("a").error or "")


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    bench = Bench(GrammarTokenizer(str(tmp_path)), is_open=True)
    bench.add("a")
    bench.finish()
    assert "tokenizer.json" in (bench.engine.end("a").error or "")
    assert bench.engine.end("a").error_kind is ErrorKind.INVALID


def guessing(tokenizer: GrammarTokenizer, regex: str) -> tuple[Constraint, int, int]:
    """One whose masks take no time, a letter and a digit."""
    native = tokenizer.get()
    matcher = Grammars(tokenizer, timeout=60)._compile_matcher(StructuredOutputs(regex=regex))
    ruled = Constraint(matcher, native, native.vocab_size, [EOS])
    ruled.draws_from_all, ruled.mask_seconds = True, 0.0
    [letter], [digit] = native.tokenize_str("x"), native.tokenize_str("7")
    return ruled, letter, digit


def test_who_is_refused_again_and_again_makes_fewer_guesses(tokenizer: GrammarTokenizer) -> None:
    ruled, letter, digit = guessing(tokenizer, "[a-z]{300}")
    guesses = []
    for place in range(80):
        if ruled.may_guess:
            guesses.append(place)
            assert not ruled.take(digit)
            ruled.pause()
        ruled.follow(letter)
    assert guesses == [0, 1, 3, 7, 15, 31, 47, 63, 79]
    while not ruled.may_guess:
        ruled.follow(letter)
    for _ in range(9):
        assert ruled.may_guess
        assert not ruled.take(digit)
        assert ruled.take(letter)
        ruled.follow(letter)


def test_guesses_are_made_again_after_what_must_follow(tokenizer: GrammarTokenizer) -> None:
    ruled, letter, digit = guessing(tokenizer, "[0-9]{16}, friend: [a-z]{9}")
    for _ in range(16):
        if ruled.may_guess:
            assert not ruled.take(letter)
            ruled.pause()
        ruled.follow(digit)
    assert 0 < len(ruled.forced) < 12
    while ruled.forced:
        ruled.follow(ruled.forced[0])
    assert ruled.may_guess
