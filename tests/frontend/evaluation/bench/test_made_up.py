"""Made-up requests fit the context, or say what would."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.evaluation.bench.made_up import Lengths

CONTEXT = 100


def refusal_of(lengths: Lengths) -> str:
    """What is said of such requests; nothing if they fit."""
    try:
        lengths.requests(1, CONTEXT)
    except ValueError as error:
        return str(error)
    return ""


@given(
    input_len=st.integers(1, 150),
    output_len=st.integers(1, 150),
    range_ratio=st.floats(0, 0.99),
    prefix_len=st.integers(0, 120),
)
def test_what_may_not_fit_is_refused_with_a_length_that_does(
    input_len: int, output_len: int, range_ratio: float, prefix_len: int
) -> None:
    lengths = Lengths(input_len, output_len, range_ratio, prefix_len)
    refusal = refusal_of(lengths)
    if "--output-len" in refusal:
        assert "--output-len" in refusal_of(replace(lengths, input_len=1))
        return
    if refusal:
        advised = int(refusal.split()[-3])
        assert advised < input_len
        lengths = replace(lengths, input_len=advised)
    made = lengths.requests(20, CONTEXT)
    assert all(request.prompt_tokens + request.output_tokens <= CONTEXT for request in made)


def test_of_a_context_of_unknown_length_all_is_sent() -> None:
    assert len([*Lengths(10**6, 1).requests(3, None)]) == 3
