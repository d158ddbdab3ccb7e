"""Tokens that a device samples, and their log probabilities, are those of the host's sampler."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import emulated_gpu
import gpu_calls
import kernel_calls
import numpy as np
import numpy.typing as npt
import pytest

from quire.kernels import _native
from quire.kernels._native import SampledRow, SampleRow, SamplingConfig
from quire.kernels.devices.instruction_sets import choose_isa
from quire.kernels.emit.cuda.choice import by_blocks
from quire.kernels.emit.dots import CUDA
from quire.kernels.emit.layout import Dtypes
from quire.kernels.emit.sampling import SampleKernel

Floats = npt.NDArray[np.float32]

DTYPES = Dtypes("f32", "f32", "f32", False)
TOP = f"{SampleRow.MOST_TOP}i4"
SAMPLED = np.dtype({
    "names": ["mass", "is_good", "token", "most", "key", "rank", "top_tokens", "top_keys"],
    "formats": ["u8", "i4", "i4", "i4", "i4", "i4", TOP, TOP],
    "offsets": [
        SampledRow.MASS, SampledRow.IS_GOOD, SampledRow.TOKEN, SampledRow.MOST, SampledRow.KEY, SampledRow.RANK,
        SampledRow.TOP_TOKENS, SampledRow.TOP_KEYS,
    ],
    "itemsize": SampledRow.BYTES,
})  # fmt: skip


@dataclass
class Row:
    """A row of logits and what is wanted of it: by `config`, or the log probabilities of `token`."""

    logits: Floats
    config: dict[str, Any] = field(default_factory=dict)
    position: int = 0
    token: int = -1

    def asked(self) -> bytes:
        """Return the SampleRow."""
        config = {**self.config, "prompt_logprobs": self.config.get("logprobs")}
        token = None if self.token < 0 else self.token
        return _native.row_to_sample(SamplingConfig(**config), len(self.logits), self.position, token)

    def expected(self) -> dict[str, Any]:
        if self.token >= 0:
            return _native.token_logprobs(self.logits, self.token, self.config["logprobs"])
        return _native.sample(self.logits, [], 0, self.position, SamplingConfig(**self.config))


def compute(rows: list[Row], on: str) -> gpu_calls.Array:
    """Return SampledRow of each row, computed by the kernel on a GPU or a CPU."""
    vocabulary = len(rows[0].logits)
    logits = np.full((len(rows), -(-vocabulary // 32) * 32), np.nan, np.float32)  # what follows is not read
    for number, row in enumerate(rows):
        logits[number, :vocabulary] = row.logits
    asked = np.frombuffer(b"".join(row.asked() for row in rows), np.uint8)
    sampled = np.zeros(len(rows), SAMPLED)
    buffers: list[gpu_calls.Array] = [logits, asked, sampled.view(np.uint8)]
    kernel, context = SampleKernel("sample", vocabulary), kernel_calls.context_of(on, DTYPES)
    if on == CUDA:
        found = gpu_calls.run(by_blocks(kernel, context), buffers, len(rows), (1, 1))
        return found[2].view(SAMPLED)
    buffers = [kernel_calls.aligned(buffer) for buffer in buffers]
    kernel_calls.run(on, kernel.emit(context), "sample", buffers, [len(rows)] * 16, (0, len(rows)))
    return buffers[2].view(SAMPLED)


def check(rows: list[Row], on: str) -> None:
    for row, found in zip(rows, compute(rows, on), strict=True):
        assert found["is_good"] == 1
        assert _native.sampled(found.tobytes(), row.config.get("logprobs")) == row.expected(), row.config


@pytest.fixture(params=["cpu", CUDA])
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An instruction set, or an emulated GPU."""
    if request.param == "cpu":
        return choose_isa().name
    emulated_gpu.use(monkeypatch, tmp_path)
    return CUDA


def rows_of(random: np.random.Generator, vocabulary: int, count: int) -> list[Row]:
    """Return rows with ties, -inf, and all kinds of what may be wanted."""
    rows = []
    for number in range(count):
        logits = (random.standard_normal(vocabulary) * random.choice([0.01, 2.0, 30.0])).astype(np.float32)
        if number % 3 == 1:
            logits = np.round(logits)
        if number % 4 == 1:
            logits[random.random(vocabulary) < 0.5] = -np.inf
            logits[random.integers(vocabulary)] = 1.0
        temperature = float(random.choice([0.0, 0.3, 1.0, 1.7]))
        config: dict[str, Any] = {"temperature": temperature, "seed": int(random.integers(2**63))}
        if number % 3:
            config["top_p"] = float(random.choice([1.0, 0.95, 0.5, 0.01]))
            config["top_k"] = int(random.choice([-1, 0, 1, 3, 20, vocabulary]))
            config["min_p"] = float(random.choice([0.0, 0.0, 0.02, 0.5]))
        if number % 2:
            config["logprobs"] = int(min(vocabulary, random.choice([0, 1, 5, SampleRow.MOST_TOP])))
        token = int(random.integers(vocabulary)) if number % 10 == 1 else -1
        rows.append(Row(logits, config, int(random.integers(10**6)), token))
    return rows


@pytest.mark.parametrize("vocabulary", [1, 7, 64, 65, 300, 4099])
def test_samples_are_those_of_the_host(vocabulary: int, on: str) -> None:
    check(rows_of(np.random.default_rng(vocabulary), vocabulary, 24 if on == CUDA else 200), on)


def test_what_cannot_be_sampled_is_noticed(on: str) -> None:
    rows = [Row(np.zeros(70, np.float32), {"logprobs": 2, "top_k": 3, "top_p": 0.5}) for _ in range(6)]
    for row, value in zip(rows[:4], (np.nan, -np.nan, np.inf, -np.inf), strict=True):
        row.logits[66] = value
    rows[4].logits[:] = -np.inf
    assert compute(rows, on)["is_good"].tolist() == [0, 0, 0, 1, 0, 1]


def test_samples_from_a_large_vocabulary(on: str) -> None:
    check(rows_of(np.random.default_rng(0), 151_936, 4), on)
