"""A sampler in numpy and float64, an independent version of `kernels/native/sampling/sampler.h`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kernels import _native

Row = npt.NDArray[np.float64]
ROUNDING = 2e-6  # of a probability, between float64 and the engine's float32 weights


@dataclass(frozen=True)
class Case:
    """The arguments of one sample."""

    logits: npt.NDArray[np.float32]
    tokens: list[int]
    num_prompt_tokens: int
    position: int
    config: dict[str, Any]

    def sample(self) -> dict[str, Any]:
        """Return the engine's sample."""
        return _native.sample(
            self.logits, self.tokens, self.num_prompt_tokens, self.position, _native.SamplingConfig(**self.config)
        )

    def field(self, name: str, default: Any) -> Any:
        """A field of the config."""
        return self.config.get(name, default)


def processed_logits(case: Case) -> Row:
    """Logits after bans, bias and penalties."""
    logits = case.logits.astype(np.float64)
    outputs = case.tokens[case.num_prompt_tokens :]
    if allowed := case.field("allowed_token_ids", []):
        logits[np.setdiff1d(np.arange(logits.size), allowed)] = -np.inf
    for *start, last in case.field("bad_words_token_ids", []):
        if outputs[len(outputs) - len(start) :] == start:
            logits[last] = -np.inf
    if len(outputs) < case.field("min_tokens", 0):
        logits[case.field("stop_token_ids", [])] = -np.inf
    for token, bias in case.field("logit_bias", []):
        logits[token] += bias
    penalty = case.field("repetition_penalty", 1.0)
    for token in set(case.tokens):
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, count in Counter(outputs).items():
        logits[token] -= case.field("frequency_penalty", 0.0) * count + case.field("presence_penalty", 0.0)
    return logits


def kept_tokens(case: Case, logits: Row, slack: float) -> Row:
    """Weights of the tokens that min_p, top_k and top_p keep, others 0; a slack above 0 lets in what rounding may."""
    scaled = (logits - logits.max()) / case.field("temperature", 1.0)
    weights: Row = np.exp(scaled)
    if min_p := case.field("min_p", 0.0):
        weights[scaled < np.log(min_p) - slack] = 0
    order = np.argsort(-logits, kind="stable")
    if (top_k := case.field("top_k", 0)) > 0:
        weights[order[top_k:]] = 0
    if (top_p := case.field("top_p", 1.0)) < 1:
        sums = np.cumsum(weights[order])
        last = np.searchsorted(sums, min(top_p + slack, 1) * sums[-1])
        weights[order[last + 1 :]] = 0
    return weights


def check_sample(case: Case) -> None:
    """Check that the engine's token is that of the float64 reference, or within rounding of its border."""
    token = case.sample()["token"]
    logits = processed_logits(case)
    if case.field("temperature", 1.0) == 0:
        assert logits[token] >= logits.max() - 1e-5, case.config
        return
    random = _native.philox(case.field("seed", 0), case.position, 0)
    for slack in (0.0, -ROUNDING, ROUNDING):
        weights = kept_tokens(case, logits, slack)
        end = np.cumsum(weights)
        low, high = (end[token] - weights[token]) / end[-1], end[token] / end[-1]
        if weights[token] > 0 and low - ROUNDING <= random <= high + ROUNDING:
            return
    raise AssertionError(f"token {token} has [{low}, {high}], the random number was {random}: {case.config}")


def random_case(random: np.random.Generator, vocab_size: int) -> Case:
    """Return a case with each parameter set or left alone at random."""
    tokens: list[int] = random.integers(0, vocab_size, random.integers(1, 40)).tolist()

    def ids(most: int) -> list[int]:
        return [int(token) for token in random.integers(0, vocab_size, random.integers(1, most))]

    config: dict[str, Any] = {"seed": int(random.integers(0, 2**64, dtype=np.uint64))}
    choices: dict[str, Any] = {
        "temperature": lambda: float(random.choice([0.0, 0.05, 0.7, 1.0, 1.7])),
        "top_k": lambda: int(random.choice([-1, 0, 1, 2, 10, vocab_size, vocab_size + 5])),
        "top_p": lambda: float(random.choice([1e-9, 0.1, 0.5, 0.9, 0.99, 1.0])),
        "min_p": lambda: float(random.choice([0.0, 1e-3, 0.05, 0.5, 1.0])),
        "repetition_penalty": lambda: float(random.uniform(0.5, 2)),
        "presence_penalty": lambda: float(random.uniform(-2, 2)),
        "frequency_penalty": lambda: float(random.uniform(-2, 2)),
        "logit_bias": lambda: [(token, float(random.uniform(-9, 9))) for token in set(ids(8))],
        "allowed_token_ids": lambda: ids(20),
        "bad_words_token_ids": lambda: [tokens[len(tokens) - n :] + ids(2) for n in range(min(3, len(tokens)))],
        "stop_token_ids": lambda: ids(4),
        "min_tokens": lambda: int(random.integers(0, 40)),
    }
    config |= {name: choose() for name, choose in choices.items() if random.random() < 0.35}
    scale = random.choice([0.1, 1, 3, 10])
    logits = (scale * random.standard_normal(vocab_size)).astype(np.float32)
    if random.random() < 0.2:  # many ties
        logits = np.round(logits)
    return Case(logits, tokens, int(random.integers(0, len(tokens) + 1)), len(tokens), config)
