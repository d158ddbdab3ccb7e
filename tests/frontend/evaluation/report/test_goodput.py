"""Limits of the goodput: their form, and the requests that meet them."""

from __future__ import annotations

import pytest

from quire.frontend.evaluation.replay.record import Outcome, RequestRecord
from quire.frontend.evaluation.report.goodput import GoodputLimits


def request(tokens: int = 11, outcome: Outcome = Outcome.COMPLETED) -> RequestRecord:
    """Return a request with TTFT 200 ms, TPOT 50 ms and, with eleven tokens, E2E 700 ms."""
    last = 1.2 + 0.05 * (tokens - 1)
    return RequestRecord(
        0, arrival=1.0, sent=1.0, prompt_tokens=8, wanted_output_tokens=tokens, outcome=outcome,
        first_token=1.2, last_token=last, ended=last, output_tokens=tokens,
    )  # fmt: skip


def test_limits_are_read_as_words_or_in_one_string() -> None:
    limits = GoodputLimits(ttft=200, tpot=50.5, e2el=2000)
    assert GoodputLimits.parse(["ttft:200", "tpot:50.5", "e2el:2000"]) == limits
    assert GoodputLimits.parse(["ttft:200 tpot:50.5 e2e:2000"]) == limits
    assert GoodputLimits.parse(["tpot:50"]).stated == {"tpot": 50.0}


@pytest.mark.parametrize("bad", ["itl:20", "ttft", "ttft:", "ttft:-5", "ttft:0", "ttft:nan", "ttft:inf", "ttft=200"])
def test_an_invalid_limit_is_rejected_with_the_valid_form(bad: str) -> None:
    with pytest.raises(ValueError, match=r"is not a limit; write METRIC:MILLISECONDS with ttft, tpot or e2el"):
        GoodputLimits.parse([bad])


def test_a_missing_and_a_repeated_limit_are_rejected() -> None:
    with pytest.raises(ValueError, match="names no limit"):
        GoodputLimits.parse([])
    with pytest.raises(ValueError, match="e2el has a limit of 20 ms already"):
        GoodputLimits.parse(["e2el:20", "e2e:30"])


def test_a_request_meets_the_limits_that_it_keeps_within() -> None:
    limits = GoodputLimits(ttft=201, tpot=49, e2el=701)
    assert limits.met(request()) == ["ttft", "e2el"]
    assert limits.met(request(outcome=Outcome.LATE)) == []


def test_an_answer_of_one_token_meets_any_limit_on_tpot() -> None:
    assert GoodputLimits(tpot=1).met(request(tokens=1)) == ["tpot"]
