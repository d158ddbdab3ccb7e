"""`python tests/support/model_bits.py MODEL ISA [OPTION=VALUE...]`: bits of a model's answers, as JSON.

Tokens, log probabilities and hidden states of greedy requests, for comparison with the same on another machine: floats
are hexadecimal, and hidden states a hash of their bytes. ISA may be `best`; options are those of LoadOptions.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import numpy as np

from quire.kernels.graph.operations import Features
from quire.kernels.options import LoadOptions
from quire.kernels.runner import ModelRunner, PreparedModel, SamplingConfig
from quire.kernels.step import StepInput

LENGTHS, CHUNK, TOKENS = (1, 17, 70, 290), 128, 12

FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8-int8-kv": {"quantization": "int8", "kv_cache_dtype": "int8"},
}
"""Formats of the demo model that are compared, as options."""


def answer(runner: ModelRunner, prompt: list[int]) -> dict[str, Any]:
    """Return the answer to a prompt, computed in chunks, and a hash of the hidden states of all tokens."""
    hidden = hashlib.sha256()
    sampling = SamplingConfig(temperature=0.0, logprobs=3)
    slot = runner.sequences.open(prompt, len(prompt), sampling=sampling)
    assert runner.sequences.reserve(slot, len(prompt) + TOKENS)
    tokens: list[int] = []
    logprobs: list[str] = []
    done = 0
    while len(tokens) < TOKENS:
        count = min(CHUNK, len(prompt) + len(tokens) - done)
        result = runner.run(StepInput([slot], [done], [count]))
        done += count
        for rows in runner.features():
            hidden.update(np.ascontiguousarray(rows[:count]).tobytes())
        if result.token_ids[0]:
            tokens += result.token_ids[0]
            entries = result.logprobs(0)
            assert entries is not None
            logprobs += [float(value).hex() for value in entries[0][1]]
    runner.sequences.close(slot)
    return {"tokens": tokens, "logprobs": logprobs, "hidden": hidden.hexdigest()}


def bits(model: str, isa: str | None, **options: Any) -> list[dict[str, Any]]:
    """Return the answers to prompts of several lengths."""
    chosen = LoadOptions(model, num_pages=64, threads=2, max_num_batched_tokens=CHUNK, isa=isa, **options)
    runner = PreparedModel(chosen, features=Features(layers=(1,), final=True)).open()
    prompts = [np.random.default_rng(length).integers(0, runner.vocab_size, length).tolist() for length in LENGTHS]
    return [answer(runner, prompt) for prompt in prompts]


if __name__ == "__main__":
    model, isa, *given = sys.argv[1:]
    answers = bits(model, None if isa == "best" else isa, **dict(option.split("=", 1) for option in given))
    json.dump(answers, sys.stdout)
