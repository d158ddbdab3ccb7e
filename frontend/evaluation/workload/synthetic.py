"""Synthetic workloads, in place of a trace."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quire.frontend.evaluation.workload.blocks import FreshBlocks, blocks_for
from quire.frontend.evaluation.workload.request import BLOCK_TOKENS, WorkloadRequest


@dataclass(frozen=True)
class RandomWorkload:
    """Requests with the random lengths of vLLM's `--dataset-name random`, in tokens.

    Lengths are uniform over the whole numbers from `len * (1 - range_ratio)` to `len * (1 + range_ratio)`. The same
    prefix of `prefix_len` tokens comes before every prompt.
    """

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0

    def requests(self, num: int, max_model_len: int | None = None, seed: int = 0) -> Iterator[WorkloadRequest]:
        """Return `num` requests that all arrive at 0; `seed` determines their lengths.

        Raises ValueError for lengths that make no request, or if one may not fit the context (None: of unknown length).
        """
        self._check(num)
        prompt, answer = self.prefix_len + self._longest(self.input_len), self._longest(self.output_len)
        if max_model_len is not None and prompt + answer > max_model_len:
            raise ValueError(
                f"a prompt of {prompt} tokens and an answer of {answer} take {prompt + answer}, more than the context "
                f"length {max_model_len}; {self._advice(max_model_len - self.prefix_len - answer)}"
            )
        generator = np.random.default_rng(seed)
        inputs, outputs = (
            generator.integers(max(1, math.floor(length * (1 - self.range_ratio))), self._longest(length) + 1, num)
            for length in (self.input_len, self.output_len)
        )
        return self._made(inputs.tolist(), outputs.tolist())

    def _check(self, num: int) -> None:
        for name, value, least in (("num", num, 1), ("input_len", self.input_len, 1),
                                   ("output_len", self.output_len, 1), ("prefix_len", self.prefix_len, 0)):  # fmt: skip
            if value < least:
                raise ValueError(f"{name}={value} is out of range; it must be at least {least}")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"range_ratio={self.range_ratio} is out of range; it must be at least 0 and less than 1")

    def _made(self, inputs: list[int], outputs: list[int]) -> Iterator[WorkloadRequest]:
        """Yield the requests. A block is as long as the prefix, so that prompts share it and nothing else."""
        block_tokens = self.prefix_len or BLOCK_TOKENS
        fresh = FreshBlocks()
        prefix = fresh.take(1) if self.prefix_len else ()
        for input_tokens, output_tokens in zip(inputs, outputs, strict=True):
            blocks = (*prefix, *fresh.take(blocks_for(input_tokens, block_tokens)))
            yield WorkloadRequest(0.0, self.prefix_len + input_tokens, output_tokens, blocks, block_tokens)

    def _longest(self, length: int) -> int:
        return math.ceil(length * (1 + self.range_ratio))

    def _advice(self, room: int) -> str:
        """Say what to lower; `room` is what is left for a prompt without its prefix."""
        length = math.floor(room / (1 + self.range_ratio))
        if length >= 1:
            return f"lower --input-len from {self.input_len} to {length} or less"
        return f"lower --output-len from {self.output_len}" + (", or --prefix-len" if self.prefix_len else "")
