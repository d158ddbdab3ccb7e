"""The workload that benchmarks make up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from quire.frontend.evaluation.workload.made_up import random_requests
from quire.frontend.evaluation.workload.request import WorkloadRequest


@dataclass(frozen=True)
class Lengths:
    """Of made-up requests, in tokens, as of `random_requests`; checked when they are made."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0

    def requests(self, num: int, max_model_len: int | None, seed: int = 0) -> Iterator[WorkloadRequest]:
        """`num` requests, all at 0. Raises ValueError if one may not fit the context, None: of unknown length."""
        made = random_requests(num, self.input_len, self.output_len, self.range_ratio, self.prefix_len, seed)
        prompt, answer = self.prefix_len + self._longest(self.input_len), self._longest(self.output_len)
        if max_model_len is not None and prompt + answer > max_model_len:
            raise ValueError(
                f"a prompt of {prompt} tokens and an answer of {answer} take {prompt + answer}, more than the context "
                f"length {max_model_len}; {self._advice(max_model_len - self.prefix_len - answer)}"
            )
        return made

    def _longest(self, length: int) -> int:
        return math.ceil(length * (1 + self.range_ratio))

    def _advice(self, room: int) -> str:
        """`room`: for a prompt, less its prefix."""
        length = math.floor(room / (1 + self.range_ratio))
        if length >= 1:
            return f"lower --input-len from {self.input_len} to {length} or less"
        return f"lower --output-len from {self.output_len}" + (", or --prefix-len" if self.prefix_len else "")
