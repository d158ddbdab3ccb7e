"""Print `kernels/native/sampling/sampling_ranges.h`, the ranges of sampling parameters for the native sampler.

    .venv/bin/python scripts/generate_sampling_ranges.py > kernels/native/sampling/sampling_ranges.h

`logprobs` and `prompt_logprobs` are not among them, since a beam search asks the sampler for more than users may, and
every seed is valid there. A `top_p` of 0 does not reach the sampler, which gets a temperature of 0 instead.
"""

from __future__ import annotations

from string import Template

from quire.protocol.messages import LOGIT_BIAS, SAMPLING_RANGES
from quire.protocol.options import Range

NAMES = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens",
)  # fmt: skip
RANGES = {name: SAMPLING_RANGES[name] for name in NAMES} | {
    "top_p": SAMPLING_RANGES["top_p"]._replace(closed=False),
    "logit_bias": LOGIT_BIAS,
}


_HEADER = """\
// Printed by scripts/generate_sampling_ranges.py from the ranges in protocol/messages.py.
#pragma once

namespace quire::sampling_ranges {

/// Numbers from `low` to `high`; `low` belongs to them if `closed`. `text` says so to users.
struct Range {
  float low, high;
  bool closed;
  const char* text;
};

$rows

}  // namespace quire::sampling_ranges
"""


def header() -> str:
    """Return the header."""
    return Template(_HEADER).substitute(rows="\n".join(_constant(name, row) for name, row in RANGES.items()))


def _constant(name: str, row: Range) -> str:
    low, high = (f"{float(end)!r}f" for end in (row.low, row.high))
    return f'inline constexpr Range {name}{{{low}, {high}, {str(row.closed).lower()}, "{row}"}};'


if __name__ == "__main__":
    print(header(), end="")
