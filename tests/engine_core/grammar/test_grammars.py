"""Requests that wait for their grammar, and their constraints then; llguidance is real, the model is not."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import small_tokenizers
from paged_executor import Engine, allowed_tokens
from patience import PATIENCE
from tokenizers import AddedToken, Tokenizer, decoders, models

from quire.engine_core.grammar import grammars, kept_grammars, mask_writer
from quire.engine_core.grammar.compile_protocol import Trial
from quire.engine_core.grammar.grammar import Compilation, TransientError
from quire.engine_core.grammar.grammars import Grammars
from quire.engine_core.grammar.matching import build_matcher, compile_matcher
from quire.engine_core.grammar.text import grammar_source
from quire.engine_core.grammar.tokenizer import GrammarTokenizer
from quire.engine_core.request import RequestStatus
from quire.engine_core.scheduling.policies import POLICIES
from quire.kernels import _native
from quire.kernels.runner import Constraint, Matcher, TokenMask, Vocabulary
from quire.kernels.weights.checkpoint import Checkpoint
from quire.protocol.messages import Abort, ErrorKind, FinishReason, Goodbye, StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLTokenizer

EOS = 4
WAITS = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
DATE = StructuredOutputs(regex=r"\d{4}-\d\d-\d\d")


class Gate:
    """Compiles grammars, but each only once it is let through."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._open = threading.Event()
        self.begun: list[str] = []
        self.has_begun = threading.Event()
        self.slow = ".*"
        self.is_killed = threading.Event()
        self.is_stopped = False
        self.kept_bytes: Callable[[], int] = int
        self.num_bytes_before: list[int] = []  # of all other grammars, when one is built
        self.num_bytes = 0  # of each grammar, as the trial says
        self.num_lost = 0  # compilations that fail for other reasons than their grammars'

    def open(self) -> None:
        self._open.set()

    def kill(self) -> None:
        self.is_killed.set()
        self._open.set()

    def start(self) -> None:
        pass

    def try_out(self, compilation: Compilation) -> Trial:
        if self.num_lost:
            self.num_lost -= 1
            raise TransientError("send it again")
        self.begun.append(str(compilation.structured.regex))
        self.has_begun.set()
        compilation.attach(self)
        if re.fullmatch(self.slow, str(compilation.structured.regex)):
            self._open.wait(PATIENCE)
        if compilation.is_cancelled:
            raise ValueError("it was cancelled")
        return Trial(grammar_source(compilation.structured), self.num_bytes)

    def build(self, trial: Trial) -> Matcher:
        self.num_bytes_before.append(self.kept_bytes() - trial.matcher_bytes)
        return build_matcher(self._tokenizer.get(), trial.source)

    def stop(self) -> None:
        self.is_stopped = True


_BENCHES: list[Bench] = []


class Bench:
    """An engine with grammars, and the semaphore that wakes its loop."""

    def __init__(
        self, tokenizer: GrammarTokenizer, *, is_open: bool = False, most_bytes: float = math.inf, **limits: Any
    ) -> None:
        self.gate = Gate(tokenizer)
        if is_open:
            self.gate.open()
        self.woken = threading.Semaphore(0)
        self.grammars = Grammars(self.gate, wake=self.woken.release, most_bytes=most_bytes)
        self.gate.kept_bytes = lambda: self.grammars.kept.num_bytes
        self.engine = Engine(self.grammars, **{"vocab_size": 2048, "num_pages": 200, **limits})
        _BENCHES.append(self)

    def add(
        self, name: str, structured: StructuredOutputs = DATE, prompt: tuple[int, ...] = (1, 2, 3), **more: Any
    ) -> None:
        more = {"eos_token_ids": [EOS], "max_tokens": 40, **more}
        self.engine.add(name, list(prompt), structured_outputs=structured, **more)

    def status(self, name: str) -> RequestStatus:
        request = self.engine.core._requests.find(b"client", name)
        assert request is not None
        return request.status

    def finish(self) -> int:
        """Steps until nothing is left, sleeping as the loop does."""
        steps = 0
        while self.engine.core.has_requests:
            if not self.engine.core.has_work:
                assert self.woken.acquire(timeout=PATIENCE)
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


@pytest.fixture(scope="module")
def native(demo_model: Path) -> LLTokenizer:
    """Return llguidance's own tokenizer."""
    from llguidance import LLTokenizer

    text = (demo_model / "tokenizer.json").read_text(encoding="utf-8")
    return LLTokenizer(text, eos_token=Checkpoint(str(demo_model)).eos_token_ids())


@pytest.fixture
def text_of(native: LLTokenizer) -> Callable[[list[int]], str]:
    return lambda token_ids: native.decode_str([token for token in token_ids if token != EOS])


def test_a_broken_tokenizer_is_an_error_and_no_panic(demo_model: Path, tmp_path: Path) -> None:
    """The library panics where the decoder is no JSON, which would end the process."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(demo_model / name)
    (tmp_path / "tokenizer.json").write_text('{"decoder": {"type": "ByteLevel", "use_regex": truX}}')
    with pytest.raises(ValueError, match=r"structured_outputs need the model's tokenizer, and .* can't be read"):
        GrammarTokenizer(str(tmp_path)).get()


@pytest.mark.parametrize("policy", POLICIES)
def test_no_request_waits_for_the_grammar_of_another(
    tokenizer: GrammarTokenizer, text_of: Callable[[list[int]], str], policy: str
) -> None:
    bench = Bench(tokenizer, scheduling_policy=policy)
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


def test_many_requests_of_a_grammar_start_bit_by_bit(
    tokenizer: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making their constraints may take long, and others go on meanwhile."""
    bench = Bench(tokenizer)
    constrain = bench.grammars.constrain

    def slow_constrain(*args: Any) -> Constraint:
        bench.engine.now += 0.004
        return constrain(*args)

    monkeypatch.setattr(bench.grammars, "constrain", slow_constrain)
    for index in range(9):
        bench.add(str(index))
    bench.gate.open()
    assert bench.woken.acquire(timeout=PATIENCE)
    numbers = []
    while any(bench.status(str(index)) is WAITS for index in range(9)):
        bench.engine.core._release_held()
        assert bench.engine.core.has_work
        numbers.append(sum(bench.status(str(index)) is not WAITS for index in range(9)))
    assert numbers == [3, 6, 9]
    bench.finish()
    assert len({tuple(bench.engine.tokens(str(index))) for index in range(9)}) == 1


@pytest.mark.parametrize("leave", [Abort(["a"]), Goodbye()])
def test_a_request_that_ends_while_its_grammar_is_compiled_leaves_nothing(
    tokenizer: GrammarTokenizer, leave: Abort | Goodbye
) -> None:
    bench = Bench(tokenizer)
    bench.add("a")
    assert bench.gate.has_begun.wait(PATIENCE)
    bench.engine.core.receive(b"client", leave)
    assert bench.engine.end_now("a").finish_reason is FinishReason.ABORT
    assert not bench.engine.core.has_requests
    assert bench.gate.is_killed.is_set()
    assert not bench.grammars.is_compiling
    assert bench.engine.core.stats.waiting == 0
    bench.add("b")  # the cancelled one is not taken for it
    bench.finish()
    assert bench.engine.end("b").finish_reason is FinishReason.STOP


def test_a_grammar_that_no_request_wants_any_more_is_not_compiled(tokenizer: GrammarTokenizer) -> None:
    bench = Bench(tokenizer)
    bench.add("a")
    bench.add("b", StructuredOutputs(regex="b+"))
    bench.add("c", StructuredOutputs(regex="c{3}"))
    bench.engine.core.receive(b"client", Abort(["b"]))
    bench.gate.open()
    bench.finish()
    assert bench.gate.begun == [DATE.regex, "c{3}"]


def test_parallel_samples_wait_together_and_share_the_prompt(tokenizer: GrammarTokenizer) -> None:
    bench = Bench(tokenizer, enable_prefix_caching=False)
    prompt = tuple(range(10, 40))
    for index in range(4):
        bench.add(str(index), prompt=prompt, seed=index, shares_prompt_with="0" if index else None)
    bench.engine.core.receive(b"client", Abort(["0"]))
    bench.gate.open()
    bench.finish()
    assert bench.engine.executor.num_forks == 2
    assert [bench.engine.end(name).finish_reason for name in "123"] == [FinishReason.STOP] * 3


def test_requests_that_wait_for_grammars_fill_the_queue(tokenizer: GrammarTokenizer) -> None:
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
    bench.engine.core.drain()
    bench.add("b")
    bench.gate.open()
    bench.finish()
    assert bench.engine.end("a").finish_reason is FinishReason.STOP
    assert bench.engine.end("b").error_kind is ErrorKind.SHUTTING_DOWN


def test_slow_grammars_of_one_tenant_keep_no_other_from_its_own(tokenizer: GrammarTokenizer) -> None:
    bench = Bench(tokenizer)
    bench.gate.slow = "slow.*"
    for index in range(5):
        bench.add(f"slow{index}", StructuredOutputs(regex=f"slow{index}"), tenant="one")
    bench.add("quick", tenant="two")
    while bench.status("quick") is WAITS:
        assert bench.woken.acquire(timeout=PATIENCE)
        bench.engine.step()
    assert set(bench.gate.begun) == {DATE.regex, "slow0"}
    bench.gate.open()
    bench.finish()
    assert all(bench.engine.end(name).finish_reason is FinishReason.STOP for name in ("quick", "slow0", "slow4"))


def test_the_oldest_grammars_are_forgotten(tokenizer: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_GRAMMARS", 2)
    bench = Bench(tokenizer, is_open=True)
    for regex in ("a{3}", "b{3}", "a{3}", "c{3}", "a{3}", "b{3}"):
        bench.add(regex, StructuredOutputs(regex=regex))
        bench.finish()
    assert bench.gate.begun == ["a{3}", "b{3}", "c{3}", "b{3}"]


def test_grammars_make_room_for_others_before_they_are_built(tokenizer: GrammarTokenizer) -> None:
    """The one used least recently goes, with its spare constraints, and is compiled again when it is wanted."""
    bench = Bench(tokenizer, is_open=True, most_bytes=20)
    bench.gate.num_bytes = 9
    for regex in ("a{3}", "b{3}", "a{3}", "c{3}"):
        bench.add(regex, StructuredOutputs(regex=regex))
        bench.finish()
        assert bench.grammars.kept.num_bytes <= 20
    assert bench.gate.num_bytes_before == [0, 9, 9]
    assert {grammar.key[1] for grammar in bench.grammars.kept._spares.values()} == {"a{3}", "c{3}"}
    bench.add("again", StructuredOutputs(regex="a{3}"))
    bench.add("b again", StructuredOutputs(regex="b{3}"))
    bench.finish()
    assert bench.gate.begun == ["a{3}", "b{3}", "c{3}", "b{3}"]


def test_grammars_of_open_requests_stay_and_others_are_refused_meanwhile(tokenizer: GrammarTokenizer) -> None:
    bench = Bench(tokenizer, is_open=True, most_bytes=20)
    bench.gate.num_bytes = 9
    bench.add("held", StructuredOutputs(regex="[a-z]{30}"))
    while not bench.engine.outputs("held"):
        if not bench.engine.core.has_work:
            assert bench.woken.acquire(timeout=PATIENCE)
        bench.engine.step()
    bench.grammars.kept.drop_all()  # near the ceiling of memory: what is held counts nevertheless
    bench.gate.num_bytes = 12
    bench.add("other", StructuredOutputs(regex="c{3}"))
    assert bench.woken.acquire(timeout=PATIENCE)
    bench.finish()
    assert bench.engine.end("held").finish_reason is FinishReason.STOP
    assert bench.engine.end("other").error_kind is ErrorKind.OVERLOADED
    assert "takes 12 bytes of memory, those of open requests take 9, and 20 are allowed" in (
        bench.engine.end("other").error or ""
    )
    bench.add("later", StructuredOutputs(regex="c{3}"))
    bench.finish()
    assert bench.engine.end("later").finish_reason is FinishReason.STOP


def test_a_grammar_that_is_larger_than_all_may_be_is_invalid(tokenizer: GrammarTokenizer) -> None:
    bench = Bench(tokenizer, is_open=True, most_bytes=20)
    bench.gate.num_bytes = 21
    bench.add("a")
    bench.finish()
    assert bench.engine.end("a").error_kind is ErrorKind.INVALID
    assert "can't be used: it takes 21 bytes of memory, and all grammars together may take 20" in (
        bench.engine.end("a").error or ""
    )


def test_forced_tokens_are_not_sampled(tokenizer: GrammarTokenizer, text_of: Callable[[list[int]], str]) -> None:
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


def forced(constraint: Constraint) -> list[int]:
    return list(iter(constraint.take_forced, None))


def test_no_token_is_forced_that_the_model_lacks(tokenizer: GrammarTokenizer, native: LLTokenizer) -> None:
    """The tokenizer has 2,048 of them."""
    [first] = native.tokenize_str("x")
    matcher = compile_matcher(tokenizer.get(), StructuredOutputs(choice=["x the quick brown fox"]))
    found = []
    for vocab_size in (2048, 300):
        constraint = Constraint(matcher, vocab_size, [EOS])
        constraint.follow(first)
        found.append(forced(constraint))
        assert constraint.error is None
    assert max(found[0]) >= 300 > max(found[1], default=0)
    assert found[0][: len(found[1])] == found[1]
    assert constraint.take_forced() is None


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
def test_masks_that_are_written_ahead_change_no_token(
    tokenizer: GrammarTokenizer, structured: StructuredOutputs, ignore_eos: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for long_seconds in (0.0, 60.0):
        monkeypatch.setattr(mask_writer, "_LONG_SECONDS", long_seconds)
        bench = Bench(tokenizer, is_open=True)
        for seed in range(6):
            bench.add(str(seed), structured, seed=seed, ignore_eos=ignore_eos)
        bench.finish()
        found.append([bench.engine.tokens(str(seed)) for seed in range(6)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "regex",
    [
        "the quick brown fox [a-z]+",
        "hello, (world|all) [.]",
        r"\d{4}-\d\d",
        "([a-z]{1,9} ){3,9}",
        r'\{"[^"\\]{2,60}": (true|[0-9]+)\}',
        "(ab|abc|é€)+",
    ],
)
@pytest.mark.parametrize("stop_token_ids", [[EOS], []])
def test_a_token_is_allowed_as_the_mask_has_it(
    tokenizer: GrammarTokenizer, regex: str, stop_token_ids: list[int]
) -> None:
    """Check all tokens on a walk through the grammar, with constraints that have the mask already and that don't."""
    matcher, random = compile_matcher(tokenizer.get(), StructuredOutputs(regex=regex)), Random(regex)
    num_tokens = tokenizer.get().num_tokens
    unmasked, masked = (Constraint(matcher, num_tokens, stop_token_ids) for _ in range(2))
    num_followed = 0
    for _ in range(12):
        if masked.begin_mask():
            masked.write_mask()
        allowed = allowed_tokens(masked.mask)
        for constraint in (unmasked, masked):
            assert [token for token in range(num_tokens + 9) if constraint.allows(token)] == allowed
        if not (going_on := [token for token in allowed if token != EOS]):
            break
        token = random.choice(going_on)
        for constraint in (unmasked, masked):
            constraint.follow(token)
        num_followed += 1
        assert unmasked.forced == masked.forced
        assert unmasked.has_ended == masked.has_ended
        if unmasked.has_ended:
            break
    assert num_followed > 1
    assert unmasked.error is None


@pytest.mark.parametrize("regex", [r"\d{4}-\d\d", "([a-z]{1,9} ){3,9}", r'\{"name": (true|[0-9]+), "key": [a-z]{3}\}'])
@pytest.mark.parametrize("has_mask", [False, True])
def test_tokens_are_allowed_together_as_they_are_one_by_one(
    tokenizer: GrammarTokenizer, regex: str, has_mask: bool
) -> None:
    """The constraint stays where it is."""
    matcher, random = compile_matcher(tokenizer.get(), StructuredOutputs(regex=regex)), Random(regex)
    num_tokens = tokenizer.get().num_tokens
    for _ in range(30):
        constraint, ahead = (Constraint(matcher, num_tokens, [EOS]) for _ in range(2))
        path, walked = list[int](), random.randrange(4)
        wrong = random.randrange(3, 12)  # where a token comes that may not
        while not ahead.has_ended and len(path) < walked + wrong:
            path.append(random.choice(allowed_tokens(ahead.mask)))
            ahead.follow(path[-1])
        for token in path[:walked]:
            constraint.follow(token)
        drafts = path[walked:]
        allowed = allowed_tokens(constraint.mask) if has_mask and not constraint.has_ended else None
        assert constraint.num_allowed(drafts) == len(drafts)
        if not ahead.has_ended:
            banned = next(token for token in range(num_tokens) if not ahead.mask.token_ids.count(token))
            assert constraint.num_allowed([*drafts, banned, banned]) == len(drafts)
            assert constraint.num_allowed([*drafts, num_tokens + 5]) == len(drafts)
        assert constraint.num_allowed([]) == 0
        assert allowed is None or allowed_tokens(constraint.mask) == allowed
    assert constraint.error is None


def test_what_is_asked_of_drafts_does_not_count_against_the_limits_of_the_grammar(tokenizer: GrammarTokenizer) -> None:
    """Each path of this one has states of its own, and llguidance gives up at 250,000 of them."""
    matcher = compile_matcher(tokenizer.get(), StructuredOutputs(regex="(a|b)*a(a|b){20}"))
    constraint, choose = Constraint(matcher, tokenizer.get().num_tokens, [EOS]), Random(1)
    letters = [token for token in allowed_tokens(constraint.mask) if token != EOS][:2]
    for _ in range(3000):
        assert constraint.num_allowed(choose.choices(letters, k=32)) == 32
    for token in choose.choices(letters, k=50):
        constraint.follow(token)
    assert constraint.error is None


@pytest.mark.parametrize(
    "grammar", ['start: "a"* <|begin|> "b"', 'start: ("a" | <|end|>) "b"', 'start: "a"+ <|user|>?']
)
@pytest.mark.parametrize("stop_token_ids", [[], [EOS], [0, 2, EOS]])
def test_eos_tokens_are_allowed_as_the_mask_has_it(
    tokenizer: GrammarTokenizer, native: LLTokenizer, grammar: str, stop_token_ids: list[int]
) -> None:
    matcher = compile_matcher(tokenizer.get(), StructuredOutputs(grammar=grammar))
    unmasked, masked = (Constraint(matcher, native.vocab_size, stop_token_ids) for _ in range(2))
    [letter] = native.tokenize_str("a")
    for _ in range(3):
        assert [token for token in range(native.vocab_size) if unmasked.allows(token)] == masked.mask.token_ids
        for constraint in (unmasked, masked):
            constraint.follow(letter)


@pytest.mark.parametrize(("grammar", "allowed"), [('start: ("a" | <|end|>) "b"', "a"), ('start: <|end|> "b"', None)])
def test_an_eos_that_the_text_may_have_and_that_does_not_stop(
    tokenizer: GrammarTokenizer, native: LLTokenizer, grammar: str, allowed: str | None
) -> None:
    """An eos token is allowed only where nothing else is, with a written mask and without."""
    matcher = compile_matcher(tokenizer.get(), StructuredOutputs(grammar=grammar))
    constraint = Constraint(matcher, native.vocab_size, [])
    assert constraint.allows(EOS) == (allowed is None)
    assert allowed_tokens(constraint.mask) == ([EOS] if allowed is None else native.tokenize_str(allowed))
    assert constraint.allows(EOS) == (allowed is None)


def test_a_stop_token_ends_the_text(tokenizer: GrammarTokenizer, native: LLTokenizer) -> None:
    matcher = compile_matcher(tokenizer.get(), StructuredOutputs(regex="[a-z]+"))
    constraint, [letter] = Constraint(matcher, native.vocab_size, [EOS]), native.tokenize_str("x")
    assert not constraint.allows(EOS)
    constraint.follow(letter)
    assert constraint.allows(EOS)
    assert not constraint.has_ended
    constraint.follow(EOS)
    assert constraint.is_complete
    assert constraint.has_ended


def test_a_forbidden_token_is_an_error(tokenizer: GrammarTokenizer, native: LLTokenizer) -> None:
    constraint = Constraint(compile_matcher(tokenizer.get(), DATE), native.vocab_size, [EOS])
    constraint.follow(native.tokenize_str("x")[0])
    assert "can't be followed any further" in (constraint.error or "")
    assert constraint.has_ended
    assert not constraint.restart()
    with pytest.raises(RuntimeError, match="can't be followed any further"):
        _ = constraint.mask


def test_a_returned_constraint_starts_anew(tokenizer: GrammarTokenizer, native: LLTokenizer) -> None:
    """Wherever it was: at the end, in the midst, with forced tokens left, with a mask; with other stop tokens."""
    structured = StructuredOutputs(json={"type": "object", "properties": {"name": {"type": "string"}}})
    matcher, random = compile_matcher(tokenizer.get(), structured), Random(3)
    used = Constraint(matcher, native.vocab_size, [EOS])
    for length in (0, 1, 2, 5, 9, 30, 60):
        stop_token_ids = random.choice([[EOS], []])
        assert used.restart()
        used.stop_at(stop_token_ids)
        fresh = Constraint(matcher, native.vocab_size, stop_token_ids)
        for _ in range(length):
            if fresh.has_ended:
                break
            assert allowed_tokens(used.mask) == allowed_tokens(fresh.mask)
            token = random.choice(allowed_tokens(fresh.mask))
            for constraint in (used, fresh):
                constraint.follow(token)
            assert used.forced == fresh.forced
            assert used.is_complete == fresh.is_complete
            if random.random() < 0.5:
                assert forced(used) == forced(fresh)
    assert used.restart()
    assert used.begin_mask()
    assert not used.restart()  # it is being written


def test_requests_share_what_a_constraint_has_learned(tokenizer: GrammarTokenizer) -> None:
    """Later requests get the constraint of an ended one with their grammar, and the same tokens."""
    bench = Bench(tokenizer, is_open=True)
    for name, structured in [("a", DATE), ("b", StructuredOutputs(regex="[a-z]{9}")), ("c", DATE), ("d", DATE)]:
        bench.add(name, structured)
        bench.finish()
    assert len(bench.grammars.kept._spares) == 2
    assert bench.engine.tokens("a") == bench.engine.tokens("c") == bench.engine.tokens("d")


def test_the_last_spare_is_taken_first_and_the_oldest_make_room(
    tokenizer: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spare constraints are dropped if there are too many, or they have followed too many tokens."""
    monkeypatch.setattr(kept_grammars, "_MAX_SPARES", 3)
    monkeypatch.setattr(kept_grammars, "_MAX_ALL_FOLLOWED", 40)
    bench = Bench(tokenizer, is_open=True)
    bench.add("first", StructuredOutputs(regex="[a-z]{9}"))
    bench.finish()
    [grammar] = bench.grammars.kept._grammars.values()
    used = [bench.grammars.constrain(grammar, 1000, [EOS]) for _ in range(5)]
    for constraint in used:
        bench.grammars.give_back(grammar, constraint)
    assert [*bench.grammars.kept._spares] == used[2:]
    assert bench.grammars.constrain(grammar, 1000, [EOS]) is used[4]
    while used[4].num_followed < 39:
        assert used[4].restart()
        for _ in range(3):
            used[4].follow(allowed_tokens(used[4].mask)[0])
    bench.grammars.give_back(grammar, used[4])
    assert [*bench.grammars.kept._spares] == used[2:]
    assert bench.grammars.constrain(grammar, 1000, [EOS]) is used[4]
    for _ in range(2):
        used[4].follow(allowed_tokens(used[4].mask)[0])
    bench.grammars.give_back(grammar, used[4])
    assert [*bench.grammars.kept._spares] == []
    monkeypatch.setattr(kept_grammars, "_MAX_FOLLOWED", used[4].num_followed)
    monkeypatch.setattr(kept_grammars, "_MAX_ALL_FOLLOWED", 1000)
    bench.grammars.give_back(grammar, used[4])
    assert [*bench.grammars.kept._spares] == [used[4]]
    assert bench.grammars.constrain(grammar, 1000, [EOS]) is used[4]
    used[4].follow(allowed_tokens(used[4].mask)[0])
    bench.grammars.give_back(grammar, used[4])
    assert [*bench.grammars.kept._spares] == []


def test_forced_texts_are_tokenized_as_by_the_tokenizer(native: LLTokenizer) -> None:
    """Long texts too; repeated ones are tokenized once, but again where the tokenizer failed."""
    import llguidance

    text = "the quick brown fox, " * 40
    asked: list[bytes] = []

    def tokenize(words: bytes) -> list[int]:
        asked.append(words)
        if is_failing:
            raise MemoryError
        return native.tokenize_bytes(words)

    texts = [native.decode_bytes([token]) for token in range(native.vocab_size)]
    vocabulary = Vocabulary(llguidance._lib.__file__, texts, native.eos_tokens, tokenize)
    for is_failing in (True, False):
        asked.clear()
        matcher = Matcher(vocabulary, "lark", f'start: "x" "{text}" | "y"')
        for _ in range(2):
            constraint = Constraint(matcher, native.vocab_size, [EOS])
            constraint.follow(native.tokenize_str("x")[0])
            written = native.decode_str(forced(constraint))
            assert written == ("" if is_failing else text[: len(written)])
            assert (len(written) > 800) == (not is_failing)
        assert (len(asked) == len(set(asked))) == (not is_failing)


def test_a_vocabulary_that_is_of_no_use(native: LLTokenizer) -> None:
    import llguidance

    library = llguidance._lib.__file__
    for texts, eos_token_ids, words in [([], [0], "of 0 tokens"), ([b"a"], [], "0 end the text"), ([b"a"], [7], "EOS")]:
        with pytest.raises(ValueError, match=words):
            Vocabulary(library, texts, eos_token_ids, native.tokenize_bytes)
    for file, words in [
        ("nowhere.so", "llguidance cannot be loaded: nowhere.so"),
        (_native.__file__, r"has no function llg_new_tokenizer_v2; install llguidance 1\.9"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            Vocabulary(str(file), [b"a"], [0], native.tokenize_bytes)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "unigram", "not special"])
def test_tokens_have_the_bytes_of_the_tokenizer(demo_model: Path, tmp_path: Path, kind: str) -> None:
    """Against llguidance's own matcher in Python: each token where anything may come, and a special one."""
    from llguidance import LLMatcher, LLTokenizer

    if kind == "unigram":
        pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)), ("▁the", -1.0), ("é", -2.0)]
        model = models.Unigram(pieces, unk_id=0, byte_fallback=True)
        tokenizer = Tokenizer(model)
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        tokenizer.add_special_tokens(["<|end|>"])
    else:
        tokenizer = small_tokenizers.KINDS["byte_level" if kind == "not special" else kind]()
    if kind == "not special":
        tokenizer.add_tokens([AddedToken("<think>", special=False)])
    text = tokenizer.to_str()
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(demo_model / name)
    own = LLTokenizer(text, eos_token=Checkpoint(str(tmp_path)).eos_token_ids())
    vocabulary = GrammarTokenizer(str(tmp_path)).get()
    assert vocabulary.num_tokens == own.vocab_size
    names = [name for name in ("<think>", "<|end|>", "</s>") if tokenizer.token_to_id(name) is not None]
    for lark in ("start: /(.|\\n)+/", *(f"start: {name}" for name in names)):
        theirs = LLMatcher(own, lark)
        ours = Constraint(Matcher(vocabulary, "lark", lark), own.vocab_size, own.eos_tokens)
        assert (theirs.get_error() or None) == ours.error
        allowed = TokenMask(own.vocab_size)
        words = np.zeros((own.vocab_size + 31) // 32, dtype=np.uint32)
        theirs.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        allowed.allow([token for token in range(own.vocab_size) if words[token // 32] >> (token % 32) & 1])
        assert ours.mask.token_ids == allowed.token_ids != []


@pytest.mark.parametrize("num_late", [1, 2, 5, 40])
def test_a_late_mask_changes_no_token(tokenizer: GrammarTokenizer, num_late: int) -> None:
    """A late mask makes a sequence compute its last token again, in prefill and in decode."""
    bench = Bench(tokenizer, is_open=True)
    structured = StructuredOutputs(regex="(the end, my friend; |no[a-z]*[.] ){4,}")
    answers = []
    for late in (0, num_late):
        bench.engine.executor.num_late_constraints = late
        for index in range(3):
            bench.add(f"{late} {index}", structured, seed=index, prompt=tuple(range(index, 9)), max_tokens=12)
        bench.finish()
        answers.append([bench.engine.tokens(f"{late} {index}") for index in range(3)])
    assert answers[0] == answers[1]
    assert bench.engine.executor.num_late_constraints == 0


def test_an_error_that_is_not_the_grammars_is_not_kept(tokenizer: GrammarTokenizer) -> None:
    bench = Bench(tokenizer, is_open=True)
    bench.gate.num_lost = 1
    for name in "ab":
        bench.add(name)
        bench.finish()
    assert bench.engine.end("a").error == "send it again"
    assert bench.engine.end("a").error_kind is ErrorKind.UNAVAILABLE
    assert bench.engine.end("b").finish_reason is FinishReason.STOP


def test_a_grammar_that_ends_nowhere_fails_its_own_requests(tokenizer: GrammarTokenizer) -> None:
    """It can be followed for a while, and then no token of the model may come: no fault of the engine's."""
    bench = Bench(tokenizer, is_open=True)
    lost = StructuredOutputs(grammar='%llguidance {"allow_invalid_utf8": true}\nstart: /a/ /\\xff/')
    bench.add("lost", lost)
    bench.add("other")
    bench.finish()
    end = bench.engine.end("lost")
    assert end.finish_reason is FinishReason.ERROR
    assert end.error_kind is ErrorKind.INVALID
    assert end.error == "the grammar can't be followed any further: none of the model's tokens may come next"
    assert bench.engine.end("other").finish_reason is FinishReason.STOP


def compiled_bench(tokenizer: GrammarTokenizer) -> Bench:
    """A request has been there, so that its grammar need not be waited for."""
    bench = Bench(tokenizer, is_open=True)
    bench.add("before")
    bench.finish()
    return bench


def test_a_failed_collect_ends_the_pending_requests(tokenizer: GrammarTokenizer) -> None:
    bench = compiled_bench(tokenizer)
    bench.add("sampled")
    bench.add("lost")
    bench.engine.add("free", [5, 6, 7], max_tokens=9)
    while not bench.engine.outputs("lost"):
        bench.engine.step()
    bench.engine.executor.fail_collect = OSError("the disk is gone")
    bench.finish()
    assert bench.engine.end("lost").finish_reason is FinishReason.ERROR
    assert "the disk is gone" in (bench.engine.end("lost").error or "")
    assert bench.engine.end("sampled").finish_reason is FinishReason.STOP
    assert bench.engine.end("free").finish_reason is FinishReason.LENGTH


def test_a_request_that_fails_while_pending_ends_once_it_is_collected(tokenizer: GrammarTokenizer) -> None:
    """Its prompt logprobs failed while its sample was pending: the sequence must stay open until that is collected."""
    bench = compiled_bench(tokenizer)
    bench.add("lost")
    bench.add("other")
    bench.engine.executor.fail_sequence = "lost"
    bench.finish()
    assert bench.engine.end("lost").finish_reason is FinishReason.ERROR
    assert bench.engine.end("lost").error == "the logits are not a number"
    assert bench.engine.end("lost").error_kind is ErrorKind.FAILED
    assert bench.engine.end("other").finish_reason is FinishReason.STOP


@pytest.mark.parametrize("num_rows_at_once", [128, 1 << 30])
def test_masks_are_prepared_after_each_token_wherever_it_was_sampled(
    tokenizer: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch, num_rows_at_once: int
) -> None:
    """The executor defers the samples of its last rows of logits alone; the other rows come with the step."""
    limits = {"max_num_seqs": 200, "max_num_batched_tokens": 600, "num_pages": 1000}
    bench = Bench(tokenizer, is_open=True, **limits)
    bench.add("before")
    bench.finish()
    bench.engine.executor.num_rows_at_once = num_rows_at_once
    bench.engine.expect_no_output()
    for index in range(140):
        bench.add(str(index), StructuredOutputs(regex="(the end|[a-z ]){60}"), seed=index)
    while any(not bench.engine.outputs(str(index)) for index in range(140)):
        if not bench.engine.core.has_work:
            assert bench.woken.acquire(timeout=60)
        bench.engine.step()
    prepared: list[Constraint] = []
    num_decoded: list[int] = []
    monkeypatch.setattr(bench.engine.core._constrained._masks, "prepare", prepared.append)
    monkeypatch.setattr(bench.engine.core.scheduler.admission, "decoded", num_decoded.append)
    running = list(bench.engine.core.scheduler.running)
    assert len(running) > 100
    num_tokens = {request: request.num_tokens for request in running}
    decoding = sum(request.num_new_tokens == 1 for request in running)
    bench.engine.step()
    left = [request for request in running if not request.is_finished]
    assert len(prepared) == len(left)
    assert {id(each) for each in prepared} == {id(request.constraint) for request in left}
    spans = [request.num_tokens - num_tokens[request] for request in running]
    assert sum(num_decoded) == decoding + sum(span for span in spans if span > 1)
    monkeypatch.undo()
    bench.finish()


def test_no_sample_is_pending_when_the_engine_fails(
    tokenizer: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception waits for pending samples before it ends the loop, since the sequences are closed next."""
    bench = compiled_bench(tokenizer)
    for name in ("one", "two", "three"):
        bench.add(name)
    collected: list[int] = []
    collect = bench.engine.executor.collect_pending

    def collect_too(result: Any) -> dict[int, list[int]]:
        collected.extend(spans := collect(result))
        return spans

    def fail(*_: object) -> None:
        raise OSError("it failed")

    monkeypatch.setattr(bench.engine.executor, "collect_pending", collect_too)
    monkeypatch.setattr(bench.engine.core._update, "_take", fail)
    with pytest.raises(OSError, match="it failed"):
        bench.engine.core.step()
    assert collected == [0, 1, 2]
    monkeypatch.undo()
    bench.engine.core.end_all("it failed")


def test_threads_end_with_the_engine_unless_they_are_stuck(
    tokenizer: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine_core.grammar.constrained._STOP_SECONDS", 0.0)
    bench = Bench(tokenizer)
    bench.add("a")
    bench.add("b", StructuredOutputs(regex="b+"))
    assert bench.gate.has_begun.wait(PATIENCE)
    assert not bench.engine.core.stop()
    bench.gate.open()
    monkeypatch.setattr("quire.engine_core.grammar.constrained._STOP_SECONDS", 60.0)
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
