"""How to bring an engine under memory pressure: its admission expects answers like those that came last."""

from __future__ import annotations

from quire.frontend import LLM, SamplingParams


def expect_short_answers(llm: LLM) -> None:
    """From now on the engine starts more requests than it has pages for, if their answers are long."""
    llm.generate([[1, 2, 3]] * 100, SamplingParams(max_tokens=1), use_tqdm=False)
