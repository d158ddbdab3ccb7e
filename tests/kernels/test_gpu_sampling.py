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
from quire.kernels._native import SampledRow, SampleRequests, SampleRow, SamplingConfig, TokenMask
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
    """A row of logits after `tokens` and what is wanted of it: by `config`, maybe only of the `allowed` tokens, or the
    log probabilities of `token`."""

    logits: Floats
    config: dict[str, Any] = field(default_factory=dict)
    position: int = 0
    token: int = -1
    tokens: list[int] = field(default_factory=list)
    prompt: int = 0
    allowed: list[int] | None = None

    def mask(self) -> TokenMask | None:
        if self.allowed is None:
            return None
        mask = TokenMask(len(self.logits))
        mask.allow(self.allowed)
        mask.publish()
        return mask

    def asked(self, requests: SampleRequests) -> bytes:
        """Return the SampleRow."""
        size = len(self.logits)
        if self.token >= 0:
            return requests.report(SamplingConfig(prompt_logprobs=self.config.get("logprobs")), size, self.token)
        config = SamplingConfig(**self.config)
        return requests.sample(config, size, self.tokens, self.prompt, self.position, self.mask())

    def expected(self) -> dict[str, Any]:
        if self.token >= 0:
            return _native.token_logprobs(self.logits, self.token, self.config["logprobs"])
        config = SamplingConfig(**self.config)
        return _native.sample(self.logits, self.tokens, self.prompt, self.position, config, self.mask())


def compute(rows: list[Row], on: str) -> gpu_calls.Array:
    """Return SampledRow of each row, computed by the kernel on a GPU or a CPU; the logits stay as they are."""
    vocabulary = len(rows[0].logits)
    logits = np.full((len(rows), -(-vocabulary // 32) * 32), np.nan, np.float32)  # what follows is not read
    for number, row in enumerate(rows):
        logits[number, :vocabulary] = row.logits
    requests = SampleRequests(vocabulary)
    asked = np.frombuffer(b"".join(row.asked(requests) for row in rows), np.uint8)
    edits, masks = (np.frombuffer(given or bytes(4), np.uint8) for given in (requests.edits, requests.masks))
    sampled = np.zeros(len(rows), SAMPLED)
    buffers: list[gpu_calls.Array] = [logits, asked, sampled.view(np.uint8), edits, masks, np.zeros_like(logits)]
    kernel, context = SampleKernel("sample", vocabulary), kernel_calls.context_of(on, DTYPES)
    if on == CUDA:
        found = gpu_calls.run(by_blocks(kernel, context), buffers, len(rows), (1, 1))
    else:
        found = [kernel_calls.aligned(buffer) for buffer in buffers]
        kernel_calls.run(on, kernel.emit(context), "sample", found, [len(rows)] * 16, (0, len(rows)))
    assert found[0].view(np.int32).tolist() == logits.view(np.int32).tolist()
    return found[2].view(SAMPLED)


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


def edited(random: np.random.Generator, row: Row, tiny: float) -> Row:
    """Return the row with changes of its logits, after some tokens, of which the last ones may begin bad words; `tiny`:
    a small repetition penalty."""
    vocabulary, config = len(row.logits), dict(row.config)
    tokens = random.integers(vocabulary, size=random.integers(12)).tolist()

    def some(most: int) -> list[int]:
        size = int(random.integers(1, min(vocabulary, most) + 1))
        return [int(token) for token in random.choice(vocabulary, size=size, replace=False)]

    for name, choices in (
        ("repetition_penalty", [1.0, 1.0, 1.3, 0.7, tiny, 3e38]),
        ("presence_penalty", [0.0, 0.0, 1.5, -2.0]),
        ("frequency_penalty", [0.0, 0.0, 0.3, -0.1]),
    ):
        config[name] = float(random.choice(choices))
    if random.random() < 0.5:
        config["logit_bias"] = [(token, float(random.choice([-100, -1.5, 2, 100]))) for token in some(40)]
    if random.random() < 0.3:
        config["allowed_token_ids"] = some(300)
    if random.random() < 0.5:
        config["bad_words_token_ids"] = [tokens[len(tokens) - n :] + some(1) for n in (0, 1, 2) if n <= len(tokens)]
    if random.random() < 0.5:
        config |= {"min_tokens": int(random.integers(12)), "stop_token_ids": some(3)}
    prompt = int(random.integers(len(tokens) + 1))
    return Row(row.logits, config, row.position, row.token, tokens, prompt)


def constrained(random: np.random.Generator, row: Row) -> Row:
    """Return the row under a mask: of few tokens, of half of them, or of all but the likeliest ones."""
    order = np.argsort(-row.logits, kind="stable")
    order = order[np.isfinite(row.logits[order])]
    first = int(random.choice([0, 0, 1, 3, 40]))
    allowed = order[first:] if first < len(order) else order[-1:]
    if first == 0:
        allowed = random.choice(order, size=random.choice([1, -(-len(order) // 2)]), replace=False)
    return Row(row.logits, row.config, row.position, row.token, row.tokens, row.prompt, allowed.tolist())


def has_choice(row: Row) -> bool:
    """True if the host samples a token of this row."""
    try:
        row.expected()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("vocabulary", [1, 7, 64, 65, 300, 4099])
def test_samples_are_those_of_the_host(vocabulary: int, on: str) -> None:
    check(rows_of(np.random.default_rng(vocabulary), vocabulary, 24 if on == CUDA else 200), on)


@pytest.mark.parametrize("vocabulary", [1, 7, 65, 300, 4099])
def test_samples_of_changed_logits_are_those_of_the_host(vocabulary: int, on: str) -> None:
    random = np.random.default_rng(vocabulary)
    tiny = 1e-38 if on == CUDA else 1e-30  # denormals count as 0, but not where a test calls a kernel of the CPU
    rows = [edited(random, row, tiny) for row in rows_of(random, vocabulary, 40 if on == CUDA else 400)]
    rows += [constrained(random, row) for row in rows_of(random, vocabulary, len(rows)) + rows]
    can = [has_choice(row) for row in rows]
    assert sum(can) > len(rows) / 2
    check([row for row, has in zip(rows, can, strict=True) if has], on)
    others = [row for row, has in zip(rows, can, strict=True) if not has]
    if others:
        assert not compute(others, on)["is_good"].any()


def test_a_mask_counts_where_edits_ban_all_that_it_allows(on: str) -> None:
    banned = {"bad_words_token_ids": [[3], [4]], "logprobs": 3}
    rows = [Row(np.arange(70, dtype=np.float32), {**banned, "seed": seed}, allowed=[3, 4]) for seed in range(6)]
    check(rows, on)
    assert {int(found["token"]) for found in compute(rows, on)} == {3, 4}


def test_what_a_mask_never_allows_is_tried_only_so_often(on: str) -> None:
    """What is left after the tries is sampled by the mask; likewise where the tried tokens had almost all of the
    mass."""
    flat, steep = np.zeros(300, np.float32), np.zeros(300, np.float32)
    steep[7] = 40.0
    rows = [Row(logits, {"seed": seed}, allowed=[11, 200]) for seed in range(8) for logits in (flat, steep)]
    check(rows, on)
    assert {int(found["token"]) for found in compute(rows, on)} == {11, 200}


def test_a_device_leaves_to_the_host_what_is_too_much() -> None:
    requests = SampleRequests(70_000)
    kind = slice(SampleRow.KIND, SampleRow.KIND + 4)
    nothing = SampleRow.NOTHING.to_bytes(4, "little")
    assert requests.sample(SamplingConfig(logprobs=21), 70_000, [], 0, 0)[kind] == nothing
    penalty, tokens = SamplingConfig(repetition_penalty=1.1), list(range(40_000))
    assert requests.sample(penalty, 70_000, tokens, 0, 0)[kind] != nothing
    before = requests.edits
    assert requests.sample(penalty, 70_000, tokens, 0, 0)[kind] == nothing
    assert requests.edits == before
    assert requests.sample(penalty, 70_000, tokens[:100], 0, 0)[kind] != nothing


def test_what_cannot_be_sampled_is_noticed(on: str) -> None:
    rows = [Row(np.zeros(70, np.float32), {"logprobs": 2, "top_k": 3, "top_p": 0.5}) for _ in range(6)]
    for row, value in zip(rows[:4], (np.nan, -np.nan, np.inf, -np.inf), strict=True):
        row.logits[66] = value
    rows[4].logits[:] = -np.inf
    assert compute(rows, on)["is_good"].tolist() == [0, 0, 0, 1, 0, 1]


def test_samples_from_a_large_vocabulary(on: str) -> None:
    random = np.random.default_rng(0)
    rows = rows_of(random, 151_936, 4)
    changed = [edited(random, row, 0.8) for row in rows] + [constrained(random, row) for row in rows]
    check([*rows, *filter(has_choice, changed)], on)
