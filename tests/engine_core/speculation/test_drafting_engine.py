"""An engine with a real model whose drafts are right, wrong, in branches, banned, or fail: answers are the same."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from paged_executor import check_accounts
from trusting_compiler import TrustingCompiler

from quire.engine_core.engine import EngineCore, EngineParts
from quire.engine_core.grammar.grammars import Grammars
from quire.engine_core.grammar.tokenizer import GrammarTokenizer
from quire.engine_core.request import Request
from quire.engine_core.scheduling.batch import Batch
from quire.engine_core.speculation.proposer import Proposer
from quire.engine_core.speculation.speculation import Speculation
from quire.kernels.options import LoadOptions
from quire.kernels.runner import ModelRunner, Sequences, load_model
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineMessage,
    FinishReason,
    SamplingParams,
    StructuredOutputs,
)

MOST = 8  # drafts
LENGTH = 100  # tokens of an answer: over several page ends
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "logprobs": 2},
    {"temperature": 0.7, "prompt_logprobs": 1, "repetition_penalty": 1.2},
    {"temperature": 0.0, "structured_outputs": StructuredOutputs(regex="[a-z ]{900}")},
]


@pytest.fixture(scope="module")
def runner(demo_model: Path) -> ModelRunner:
    return load_model(LoadOptions(str(demo_model), num_pages=64, threads=2))


class Answers:
    """An engine that has run all its requests."""

    def __init__(self, runner: ModelRunner, demo_model: Path, proposer: Proposer | None = None) -> None:
        names = ("vocab_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_pages")
        limits = EngineShape(**{name: getattr(runner, name) for name in names})
        speculation = None
        if proposer is not None:
            speculation = Speculation(proposer, runner.sequences, MOST, limits, is_adaptive=False)
        grammars = Grammars(TrustingCompiler(GrammarTokenizer(str(demo_model))))
        self._sent: list[EngineMessage] = []
        features = [] if speculation is None else [speculation]
        core = EngineCore(
            runner, limits, lambda _, message: self._sent.append(message), EngineParts(features, grammars)
        )
        for index, fields in enumerate(PARAMS):
            params = SamplingParams(seed=index, max_tokens=LENGTH, ignore_eos=True, **fields)
            core.receive(b"client", EngineCoreRequest(f"{index}", [*range(5, 25 + 3 * index)], params))
        while core.has_requests:
            core.step()
            check_accounts(core, limits)
        core.flush()
        assert runner.sequences.held_pages == 0
        self.totals = None if speculation is None else speculation.totals

    def of(self, index: int) -> tuple[list[int], list[Any], FinishReason | None, str | None]:
        """Return all that must be equal of a request's answer."""
        outputs = [
            output for message in self._sent if isinstance(message, EngineCoreOutputs)
            for output in message.outputs if output.request_id == f"{index}"
        ]  # fmt: skip
        tokens = [token for output in outputs for token in output.new_token_ids]
        logprobs = [entry for output in outputs for entry in output.new_logprobs or ()]
        return tokens, logprobs, outputs[-1].finish_reason, outputs[-1].error

    @property
    def all(self) -> list[Any]:
        """Return the answers of all requests."""
        return [self.of(index) for index in range(len(PARAMS))]


@pytest.fixture(scope="module")
def expected(runner: ModelRunner, demo_model: Path) -> Answers:
    answers = Answers(runner, demo_model)
    assert all(reason is FinishReason.LENGTH and error is None for _, _, reason, error in answers.all)
    return answers


class Scripted(Proposer):
    """Knows the answers, and drafts them, or others, with branches beside them; often nothing."""

    def __init__(self, sequences: Sequences, expected: Answers, seed: int) -> None:
        self._sequences = sequences
        self._expected = expected
        self._random = random.Random(seed)
        self._branches: list[tuple[int, list[int]]] = []

    def propose(self, requests: Sequence[Request], most: list[int], least: float) -> list[int]:
        self._branches = []
        return [
            self._draft(row, request, bound) for row, (request, bound) in enumerate(zip(requests, most, strict=True))
        ]

    def _draft(self, row: int, request: Request, bound: int) -> int:
        choose, index = self._random, int(request.request_id)
        right = self._expected.of(index)[0][request.num_tokens - request.num_prompt_tokens :][:bound]
        drafts = right[: choose.randrange(len(right) + 1)]
        while len(drafts) < len(right) and choose.random() < 0.8:
            drafts.append(choose.randrange(2048) if request.constraint is None else choose.choice((0, *right)))
        if choose.random() < 0.5 or not self._sequences.reserve(request.slot, request.num_tokens + len(drafts)):
            return 0
        for token in drafts:
            self._sequences.append(request.slot, token)
        if drafts and request.constraint is None and choose.random() < 0.5:
            self._branches.append((row, right[: choose.randrange(1, len(drafts) + 1)]))
        return len(drafts)

    def branches(self, requests: Sequence[Request], least: float) -> list[tuple[int, list[int]]]:
        return self._branches

    def learn(self, slots: list[int], accepted: list[int]) -> None:
        assert all(0 <= each <= MOST for each in accepted)


@pytest.mark.parametrize("seed", range(6))
def test_answers_and_pages_are_those_without_drafts(
    runner: ModelRunner, demo_model: Path, expected: Answers, seed: int
) -> None:
    answers = Answers(runner, demo_model, Scripted(runner.sequences, expected, seed))
    assert answers.all == expected.all
    assert answers.totals is not None
    assert 0 < answers.totals.accepted_tokens < answers.totals.draft_tokens


class Failing(Scripted):
    """Fails when it is called in one way for the 20th time, or for the first when a request arrives."""

    def __init__(self, sequences: Sequences, expected: Answers, method: str) -> None:
        super().__init__(sequences, expected, 0)
        self._method = method
        self.num_calls = 0

    @property
    def observes(self) -> bool:
        return True

    def _count(self, method: str) -> None:
        if method == self._method:
            self.num_calls += 1
            if self.num_calls == (1 if method in {"begin", "end"} else 20):
                raise MemoryError(method)

    def propose(self, requests: Sequence[Request], most: list[int], least: float) -> list[int]:
        counts = super().propose(requests, most, least)
        self._count("propose")
        return counts

    def branches(self, requests: Sequence[Request], least: float) -> list[tuple[int, list[int]]]:
        self._count("branches")
        return super().branches(requests, least)

    def learn(self, slots: list[int], accepted: list[int]) -> None:
        self._count("learn")

    def begin(self, request: Request) -> None:
        self._count("begin")

    def observe(self, batch: Batch) -> None:
        self._count("observe")

    def end(self, request: Request) -> None:
        self._count("end")


@pytest.mark.parametrize("method", ["begin", "propose", "branches", "learn", "observe", "end"])
def test_an_engine_whose_drafting_fails_goes_on_without(
    runner: ModelRunner, demo_model: Path, expected: Answers, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(runner.sequences, expected, method)
    with caplog.at_level(logging.ERROR):
        assert Answers(runner, demo_model, failing).all == expected.all
    assert caplog.text.count("drafting has failed") == 1
    assert failing.num_calls == (1 if method in {"begin", "end"} else 20)
