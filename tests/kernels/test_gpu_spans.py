"""Steps with drafts on a GPU, under constraints, penalties and filters, sample what a CPU does without drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest

from quire.engine_core.grammar.tokenizer import GrammarTokenizer
from quire.kernels import options, runner
from quire.kernels.runner import Constraint, Matcher, ModelRunner, SamplingConfig, TokenMask
from quire.kernels.step import StepInput

SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "logprobs": 1},
    {"logprobs": 3},
    {"top_p": 0.9, "top_k": 50},
    {"repetition_penalty": 1.3, "logit_bias": [(7, 3.0), (300, -2.0)]},
    {"frequency_penalty": 0.8, "presence_penalty": -0.5, "temperature": 0.0},
    {"min_tokens": 4, "stop_token_ids": [300, 301], "bad_words_token_ids": [[11]]},
    {"allowed_token_ids": list(range(200, 1400)), "min_p": 0.01},
    {"min_p": 1e-40, "presence_penalty": 1e-40},  # denormals, which are zeros
]
PROMPT = [5, 6, 7]
COUNT, DRAFTS = 9, 3


@dataclass
class Stream:
    """A sequence, and what was sampled of it."""

    slot: int
    start: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    num_accepted: int = 0


def constraints(matcher: Matcher, vocabulary: int) -> list[Constraint | TokenMask | None]:
    """Return none, a grammar with a forced text after some free tokens, and a mask of every third token."""
    mask = TokenMask(vocabulary)
    mask.allow(list(range(0, vocabulary, 3)))
    mask.publish()
    return [None, Constraint(matcher, vocabulary, []), mask]


def generate(engine: ModelRunner, matcher: Matcher, known: list[list[int]] | None = None) -> list[Stream]:
    """Let all kinds of sequences generate; with the tokens that are `known`, these are drafts, each third one wrong."""
    streams: list[Stream] = []
    for config in SAMPLING:
        for constraint in constraints(matcher, engine.vocab_size):
            sampling = SamplingConfig(**{"seed": len(streams), **config})
            slot = engine.sequences.open(PROMPT, len(PROMPT), sampling=sampling, constraint=constraint)
            assert engine.sequences.reserve(slot, len(PROMPT) + COUNT + 2 * DRAFTS + 32)
            streams.append(Stream(slot))
    while left := [number for number, stream in enumerate(streams) if len(stream.tokens) < COUNT]:
        drafts = []
        for number in left:
            stream = streams[number]
            done = len(stream.tokens)
            own = [] if known is None or not done else known[number][done : done + DRAFTS]
            if done % 3 == 2 and own:
                own[-1] = (own[-1] + 1) % engine.vocab_size
            for token in own:
                engine.sequences.append(stream.slot, token)
            drafts.append(own)
        chosen = [streams[number] for number in left]
        lengths = [len(engine.sequences.tokens(stream.slot)) for stream in chosen]
        counts = [length - stream.start for length, stream in zip(lengths, chosen, strict=True)]
        slots, starts = [stream.slot for stream in chosen], [stream.start for stream in chosen]
        result = engine.run(StepInput(slots, starts, counts, [len(own) for own in drafts]))
        while engine.collect_pending(result):
            pass
        assert not result.errors
        for row, (stream, own) in enumerate(zip(chosen, drafts, strict=True)):
            span = result.token_ids[row]
            stream.tokens += span
            stream.logprobs += result.logprobs(row) or []
            stream.num_accepted += min(len(span) - 1, len(own))
            stream.start = min(len(engine.sequences.tokens(stream.slot)) - 1, stream.start + counts[row])
    for stream in streams:
        engine.sequences.close(stream.slot)
    return streams


def test_spans_are_those_of_the_cpu(demo_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulated_gpu.use(monkeypatch, tmp_path)
    cpu, gpu = (
        runner.load_model(options.LoadOptions(str(demo_model), num_pages=200, threads=2, device=device))
        for device in ("cpu", "cuda")
    )
    vocabulary = GrammarTokenizer(str(demo_model)).get()
    matcher = Matcher(vocabulary, "lark", r'start: /[a-z ]{5,9}/ ". The end, and " /[a-z ]{4,40}/')
    expected = generate(cpu, matcher)
    found = generate(gpu, matcher, [stream.tokens for stream in expected])
    for own, other in zip(found, expected, strict=True):
        count = min(len(own.tokens), len(other.tokens))
        assert own.tokens[:count] == other.tokens[:count]
        count = min(len(own.logprobs), len(other.logprobs))
        assert own.logprobs[:count] == other.logprobs[:count]
    assert all(stream.num_accepted >= 2 for stream in found)


@pytest.mark.parametrize(
    ("sampling", "is_needed"),
    [
        ({}, False),
        ({"min_p": 1e-40}, False),
        ({"logprobs": 300}, False),
        ({"temperature": 0.0, "logprobs": 2}, False),
        ({"top_p": 0.9}, True),
        ({"min_tokens": 3, "stop_token_ids": [9]}, True),
    ],
    ids=str,
)
def test_a_mask_is_written_only_if_the_host_would_need_it(
    sampling: dict[str, Any], is_needed: bool, demo_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So no grammar fails that would not on a CPU: a mask may be too much for it."""
    emulated_gpu.use(monkeypatch, tmp_path)
    engine = runner.load_model(options.LoadOptions(str(demo_model), num_pages=20, threads=1, device="cuda"))
    matcher = Matcher(GrammarTokenizer(str(demo_model)).get(), "lark", "start: /[a-z ]{5,90}/")
    constraint = Constraint(matcher, engine.vocab_size, [])
    config = SamplingConfig(seed=3, **sampling)
    slot = engine.sequences.open(PROMPT, len(PROMPT), sampling=config, constraint=constraint)
    assert engine.sequences.reserve(slot, len(PROMPT) + 8)
    result = engine.run(StepInput([slot], [0], [len(PROMPT)]))
    while engine.collect_pending(result):
        pass
    assert len(result.token_ids[0]) == 1
    assert (constraint.mask_seconds > 0) == is_needed
