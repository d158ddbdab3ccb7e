"""The native sampler allows the values that the protocol allows, and rejects others in the same words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generate_sampling_ranges import RANGES, header

from quire.kernels import _native
from quire.kernels._native import SamplingConfig
from quire.protocol.messages import SAMPLING_RANGES

HEADER = Path(__file__).parents[2] / "kernels" / "native" / "sampling" / "sampling_ranges.h"
WIDER = {"seed", "logprobs", "prompt_logprobs"}
"""Parameters of which the native sampler allows more values: see the generator."""

INTEGERS = {"top_k", "min_tokens"}
MAX_INT32 = 2**31 - 1


def sample(name: str, value: float) -> None:
    given: Any = [(0, value)] if name == "logit_bias" else int(value) if name in INTEGERS else value
    _native.sample(np.zeros(4, np.float32), [], 0, 0, SamplingConfig(**{name: given}))


def test_the_header_is_up_to_date() -> None:
    """`scripts/generate_sampling_ranges.py > kernels/native/sampling/sampling_ranges.h` writes it anew."""
    assert HEADER.read_text(encoding="utf-8") == header()


def test_every_native_parameter_with_a_range_has_a_row() -> None:
    native = {name for name in SAMPLING_RANGES if hasattr(SamplingConfig, name)}
    assert native - WIDER == RANGES.keys() - {"logit_bias"}


@pytest.mark.parametrize("name", RANGES)
def test_the_ends_of_the_ranges_are_the_protocols(name: str) -> None:
    row = RANGES[name]
    if name in INTEGERS:
        values = [row.low - 1, row.low, row.low + 1, MAX_INT32]
    else:
        ends = [np.float32(row.low), np.float32(row.high)]
        beside = [float(np.nextafter(end, np.float32(side))) for end in ends for side in (-math.inf, math.inf)]
        values = [row.low, row.high, *beside, math.inf, -math.inf]
    assert {row.holds(value) for value in values} == {True, False}
    for value in values:
        if row.holds(value):
            sample(name, value)
        else:
            with pytest.raises(ValueError, match=f"^{name}=.* is out of range; it must be {row}$"):
                sample(name, value)


@pytest.mark.parametrize("name", [name for name in RANGES if name not in INTEGERS])
def test_nan_is_in_no_range(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=nan is out of range; it must be {RANGES[name]}"):
        sample(name, math.nan)


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", -0.1), ("top_k", -2), ("top_p", 1.5), ("presence_penalty", 2.0625)]
)
def test_the_words_are_the_protocols(name: str, value: float) -> None:
    with pytest.raises(ValueError, match="out of range") as expected:
        RANGES[name].check(name, value)
    with pytest.raises(ValueError, match="out of range") as found:
        sample(name, value)
    assert str(found.value) == str(expected.value)
