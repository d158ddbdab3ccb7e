"""Workloads that no trace has."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from quire.frontend.evaluation.workload.blocks import FreshBlocks, blocks_for
from quire.frontend.evaluation.workload.request import BLOCK_TOKENS, WorkloadRequest


def random_requests(
    num: int, input_len: int, output_len: int, range_ratio: float = 0.0, prefix_len: int = 0, seed: int = 0
) -> Iterator[WorkloadRequest]:
    """`num` requests that all come at 0, with the lengths of vLLM's `--dataset-name random`; `seed` decides them.

    Lengths are whole numbers from `len * (1 - range_ratio)` to `len * (1 + range_ratio)`, each as likely as others.
    Before each prompt comes the same prefix of `prefix_len` tokens. Raises ValueError for lengths that make no request.
    """
    for name, value, least in (("num", num, 1), ("input_len", input_len, 1), ("output_len", output_len, 1),
                               ("prefix_len", prefix_len, 0)):  # fmt: skip
        if value < least:
            raise ValueError(f"{name}={value} is out of range; it must be at least {least}")
    if not 0 <= range_ratio < 1:
        raise ValueError(f"range_ratio={range_ratio} is out of range; it must be at least 0 and less than 1")
    generator = np.random.default_rng(seed)
    inputs, outputs = (
        generator.integers(
            max(1, math.floor(length * (1 - range_ratio))), math.ceil(length * (1 + range_ratio)) + 1, num
        )
        for length in (input_len, output_len)
    )
    return _requests(inputs.tolist(), outputs.tolist(), prefix_len)


def _requests(inputs: list[int], outputs: list[int], prefix_len: int) -> Iterator[WorkloadRequest]:
    """A block is as long as the prefix, so that prompts share it and nothing else."""
    block_tokens = prefix_len or BLOCK_TOKENS
    fresh = FreshBlocks()
    prefix = fresh.take(1) if prefix_len else ()
    for input_tokens, output_tokens in zip(inputs, outputs, strict=True):
        blocks = (*prefix, *fresh.take(blocks_for(input_tokens, block_tokens)))
        yield WorkloadRequest(0.0, prefix_len + input_tokens, output_tokens, blocks, block_tokens)
