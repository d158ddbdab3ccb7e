"""Memory pressure on an engine, whose admission expects answers as long as the last ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from quire.frontend import LLM, SamplingParams

T = TypeVar("T")

_ATTEMPTS = 10  # how many requests run together depends on how fast the host is


def expect_short_answers(llm: LLM) -> None:
    """Make the engine admit more requests than it has pages for, if their answers are long."""
    llm.generate([[1, 2, 3]] * 100, SamplingParams(max_tokens=1), use_tqdm=False)


def under_pressure(llm: LLM, ask: Callable[[], T]) -> T:
    """Return the result of `ask` when the engine has had to preempt requests."""
    before = llm.stats()["preemptions"]
    for _ in range(_ATTEMPTS):
        expect_short_answers(llm)
        answers = ask()
        if llm.stats()["preemptions"] > before:
            return answers
    raise AssertionError("the KV memory was large enough; nothing was shown")
