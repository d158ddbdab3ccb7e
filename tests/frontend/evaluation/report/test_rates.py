"""Token rates, in bounded memory."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from quire.frontend.evaluation.report import rates
from quire.frontend.evaluation.report.rates import TokenRate, in_slots


def test_short_runs_have_slots_of_a_tenth_of_a_second() -> None:
    output, prompts = TokenRate(), TokenRate()
    output.add_chunks(0.05, array("d", [0.1, 0.1, 1.0]), 8)
    prompts.add(0.31, 5)
    width, (tokens, of_prompts) = in_slots((output, prompts), 1.0)
    assert width == 0.1
    assert tokens.tolist() == [2, 2, 2, 0, 0, 0, 0, 0, 0, 2]  # tokens after the end are in the last
    assert of_prompts.tolist() == [0, 0, 0, 5, 0, 0, 0, 0, 0, 0]
    assert output.most_per_second == 6


def test_slots_get_wider_over_months_and_no_token_is_lost() -> None:
    random = np.random.default_rng(0)
    times = np.sort(random.uniform(0, 121 * 86400.0, 20_000))
    output, prompts = TokenRate(), TokenRate()
    for time in times.tolist():
        output.add(time, 2)
    prompts.add(1.0, 7)
    width, (tokens, of_prompts) = in_slots((output, prompts), 121 * 86400.0)
    assert len(tokens) == len(of_prompts) <= 1 << 15
    expected, _ = np.histogram(times, np.append(np.arange(len(tokens)), np.inf) * width, weights=np.full(20_000, 2.0))
    np.testing.assert_array_equal(tokens, expected)
    assert (of_prompts[0], of_prompts.sum()) == (7, 7)


def test_the_best_second_is_found_though_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_MOST_SECONDS", 64)
    random = np.random.default_rng(1)
    seconds = np.zeros(2000)
    rate = TokenRate()
    for begin in np.sort(random.uniform(0, 1900, 3000)).tolist():
        gaps = array("d", random.uniform(0, 1.5, 20).tolist())
        rate.add_chunks(begin, gaps, 21)
        np.add.at(seconds, (np.cumsum([begin, *gaps]) * 10).astype(int) // 10, 1)
    assert rate.most_per_second == seconds.max()
    assert len(rate._best._tokens) <= 64
