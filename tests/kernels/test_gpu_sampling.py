"""Tokens that a device samples, and their log probabilities, are those of the host's sampler."""

from __future__ import annotations

from collections.abc import Callable
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
from quire.kernels._native import LogitEdit, SampledRow, SampleRequests, SampleRow, SamplingConfig, TokenMask
from quire.kernels.devices.instruction_sets import choose_isa
from quire.kernels.emit.cuda.choice import by_blocks
from quire.kernels.emit.dots import CUDA
from quire.kernels.emit.layout import Dtypes
from quire.kernels.emit.sampling import SampleKernel

Floats = npt.NDArray[np.float32]

DTYPES = Dtypes("f32", "f32", "f32", False)
SAMPLED = np.dtype({
    "names": ["is_good", "token", "num_tried"],
    "formats": ["i4", "i4", "i4"],
    "offsets": [SampledRow.IS_GOOD, SampledRow.TOKEN, SampledRow.NUM_TRIED],
    "itemsize": SampledRow.BYTES,
})  # fmt: skip


@dataclass
class Row:
    """A row of logits after `tokens` and what is wanted of it: by `config`, optionally only of the `allowed` tokens, or
    the log probabilities of `token`."""

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
        if self.token >= 0:
            return requests.report(self.token, self.config["logprobs"])
        config = SamplingConfig(**self.config)
        return requests.sample(config, self.tokens, self.prompt, self.position, self.mask())

    def asked_again(self, requests: SampleRequests, token: int | None) -> bytes:
        """Return the SampleRow for the log probabilities of the token, or for a sample by the mask."""
        if token is not None:
            return requests.report(token, self.config["logprobs"])
        config = SamplingConfig(**self.config)
        return requests.sample(config, self.tokens, self.prompt, self.position, self.mask(), was_tried=True)

    def expected(self) -> dict[str, Any]:
        if self.token >= 0:
            return _native.token_logprobs(self.logits, self.token, self.config["logprobs"])
        config = SamplingConfig(**self.config)
        return _native.sample(self.logits, self.tokens, self.prompt, self.position, config, self.mask())


@dataclass
class Computed:
    """What the kernel has computed of a row."""

    asked: bytes
    sampled: Any
    changed: bytes
    vocabulary: int

    def token(self, row: Row) -> int | None:
        """Return the sampled token, None if the constraint allows none of those that were tried."""
        return _native.sampled_token(self.asked, self.sampled.tobytes(), row.mask())

    def result(self) -> dict[str, Any]:
        return _native.sampled(self.asked, self.sampled.tobytes(), self.changed, self.vocabulary)


@dataclass
class Outcome:
    """A sampled row; it `came_again` if it was sampled once more."""

    result: dict[str, Any]
    came_again: bool

    @property
    def token(self) -> int:
        return int(self.result["token"])


def compute(rows: list[Row], on: str, ask: Callable[[SampleRequests, int], bytes] | None = None) -> list[Computed]:
    """Compute rows by the kernel on a GPU or a CPU; the logits stay as they are. `ask` gives the SampleRow of a row's
    number, by default the first one."""
    vocabulary, count = len(rows[0].logits), len(rows)
    logits = np.full((count, -(-vocabulary // 32) * 32), np.nan, np.float32)  # what follows is not read
    for number, row in enumerate(reversed(rows)):
        logits[number, :vocabulary] = row.logits
    requests = SampleRequests(vocabulary)
    asked = [row.asked(requests) if ask is None else ask(requests, number) for number, row in enumerate(rows)]
    edits = np.frombuffer(requests.edits or bytes(LogitEdit.BYTES), np.uint8)
    masks = np.frombuffer(requests.masks or bytes(4 * -(-vocabulary // 32)), np.uint8)  # there is room for one
    sampled = np.zeros(count, SAMPLED)
    given = np.frombuffer(b"".join(asked), np.uint8).copy().reshape(count, SampleRow.BYTES)
    given[:, SampleRow.ROW : SampleRow.ROW + 4] = np.arange(count, dtype=np.int32)[::-1, None].copy().view(np.uint8)
    buffers: list[gpu_calls.Array] = [logits, given, sampled.view(np.uint8), edits, masks, np.zeros_like(logits)]
    kernel, context = SampleKernel("sample", vocabulary), kernel_calls.context_of(on, DTYPES)
    if on == CUDA:
        found = gpu_calls.run(by_blocks(kernel, context), buffers, count, (1, 1))
    else:
        found = [kernel_calls.aligned(buffer) for buffer in buffers]
        kernel_calls.run(on, kernel.emit(context), "sample", found, [count] * 16, (0, count))
    assert found[0].view(np.int32).tolist() == logits.view(np.int32).tolist()
    changed = [row.tobytes() for row in reversed(found[5])]
    results = zip(asked, found[2].view(SAMPLED), changed, strict=True)
    return [Computed(*result, vocabulary) for result in results]


def check(rows: list[Row], on: str) -> list[Outcome]:
    """Compare what is sampled with what the host samples; return it. A row is sampled once more where the constraint
    allows none of the tokens that were tried, or where log probabilities of another one than the first are wanted."""
    first, outcomes = compute(rows, on), []
    tokens = [each.token(row) for row, each in zip(rows, first, strict=True)]
    again = [
        number
        for number, (row, each, token) in enumerate(zip(rows, first, tokens, strict=True))
        if token is None or (row.config.get("logprobs") is not None and token != each.sampled["token"])
    ]

    def ask(requests: SampleRequests, number: int) -> bytes:
        return rows[again[number]].asked_again(requests, tokens[again[number]])

    second = compute([rows[number] for number in again], on, ask) if again else []
    for number, (row, each, token) in enumerate(zip(rows, first, tokens, strict=True)):
        came_again = number in again
        result = second[again.index(number)].result() if came_again else {**each.result(), "token": token}
        assert result == row.expected(), row.config
        assert not came_again or row.allowed is not None
        outcomes.append(Outcome(result, came_again))
    return outcomes


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
            config["logprobs"] = int(min(vocabulary, random.choice([0, 1, 5, 20])))
        token = int(random.integers(vocabulary)) if number % 10 == 1 else -1
        rows.append(Row(logits, config, int(random.integers(10**6)), token))
    return rows


def edited(random: np.random.Generator, row: Row, tiny: float) -> Row:
    """Return the row with changes of its logits, after some tokens, of which the last ones may begin bad words; `tiny`:
    a small repetition penalty, whose reciprocal is a large one."""
    vocabulary, config = len(row.logits), dict(row.config)
    tokens = random.integers(vocabulary, size=random.integers(12)).tolist()

    def some(most: int) -> list[int]:
        size = int(random.integers(1, min(vocabulary, most) + 1))
        return [int(token) for token in random.choice(vocabulary, size=size, replace=False)]

    for name, choices in (
        ("repetition_penalty", [1.0, 1.0, 1.3, 0.7, tiny, 1 / tiny]),
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


def error_of(call: Callable[[], object]) -> str:
    """Return the text of the error that a call raises, or nothing."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("vocabulary", [1, 7, 64, 65, 300, 4099])
def test_samples_are_those_of_the_host(vocabulary: int, on: str) -> None:
    check(rows_of(np.random.default_rng(vocabulary), vocabulary, 24 if on == CUDA else 200), on)


@pytest.mark.parametrize("vocabulary", [1, 7, 65, 300, 4099])
def test_samples_of_changed_logits_are_those_of_the_host(vocabulary: int, on: str) -> None:
    random = np.random.default_rng(vocabulary)
    tiny = 1e-38 if on == CUDA else 1e-30  # denormals count as 0, but not where a test calls a kernel of the CPU
    rows = [edited(random, row, tiny) for row in rows_of(random, vocabulary, 40 if on == CUDA else 400)]
    rows += [constrained(random, row) for row in rows_of(random, vocabulary, len(rows)) + rows]
    can = [not error_of(row.expected) for row in rows]
    assert sum(can) > len(rows) / 2
    again = [row for row in check([row for row, has in zip(rows, can, strict=True) if has], on) if row.came_again]
    assert 0 < len(again) < len(rows) / 4 or vocabulary == 1
    others = [row for row, has in zip(rows, can, strict=True) if not has]
    for row, computed in zip(others, compute(others, on) if others else [], strict=True):
        assert error_of(computed.result) == error_of(row.expected)


def test_a_mask_counts_where_edits_ban_all_that_it_allows(on: str) -> None:
    banned = {"bad_words_token_ids": [[3], [4]], "logprobs": 3}
    rows = [Row(np.arange(70, dtype=np.float32), {**banned, "seed": seed}, allowed=[3, 4]) for seed in range(6)]
    assert {row.token for row in check(rows, on)} == {3, 4}


def test_a_constraint_takes_the_first_of_16_tokens_that_it_allows(on: str) -> None:
    """A row is sampled once more by the mask if it allows none of these."""
    logits = np.linspace(0, -60, 64, dtype=np.float32)
    rows = [Row(logits, {"temperature": 0.0}, allowed=[first, 40]) for first in (0, 3, 15, 16)]
    found = check(rows, on)
    assert [row.token for row in found] == [0, 3, 15, 16]
    assert [row.came_again for row in found] == [False, False, False, True]
    flat = [Row(np.zeros(64, np.float32), {"seed": seed}, allowed=[5, 40, 41]) for seed in range(20)]
    found = check(flat, on)
    assert {row.token for row in found} == {5, 40, 41}
    assert {row.came_again for row in found} == {False, True}


def test_tries_end_where_almost_no_mass_is_left(on: str) -> None:
    """As on the host, which then asks for the mask: what is left is too coarse."""
    steep = np.zeros(300, np.float32)
    steep[7] = 40.0
    rows = [Row(steep, {"seed": seed}, allowed=[11, 200]) for seed in range(8)]
    assert all(row.came_again for row in check(rows, on))
    assert [int(each.sampled["num_tried"]) for each in compute(rows, on)] == [1] * 8


def test_a_token_that_is_not_the_first_is_reported_once_more(on: str) -> None:
    rows = [Row(np.arange(70, dtype=np.float32), {"temperature": 0.0, "logprobs": 2}, allowed=[n]) for n in (69, 68)]
    assert [row.came_again for row in check(rows, on)] == [False, True]


def test_a_device_leaves_to_the_host_what_is_too_much() -> None:
    requests = SampleRequests(200_000)
    kind = slice(SampleRow.KIND, SampleRow.KIND + 4)
    nothing = SampleRow.NOTHING.to_bytes(4, "little")
    assert requests.sample(SamplingConfig(logprobs=100_000), [], 0, 0)[kind] != nothing
    assert requests.sample(SamplingConfig(logprobs=100_001), [], 0, 0)[kind] == nothing
    penalty, tokens = SamplingConfig(repetition_penalty=1.1), list(range(150_000))
    assert requests.sample(penalty, tokens, 0, 0)[kind] != nothing
    assert requests.sample(penalty, tokens, 0, 0)[kind] != nothing
    assert requests.sample(penalty, tokens, 0, 0)[kind] != nothing
    before = requests.edits
    assert requests.sample(penalty, tokens, 0, 0)[kind] == nothing
    assert requests.edits == before
    assert requests.sample(penalty, tokens[:70_000], 0, 0)[kind] != nothing


def test_a_token_has_one_bias() -> None:
    with pytest.raises(ValueError, match="logit_bias=3; it must be a token that has no other bias"):
        SampleRequests(9).sample(SamplingConfig(logit_bias=[(3, 1.0), (4, 1.0), (3, 2.0)]), [], 0, 0)


def test_what_cannot_be_sampled_is_named(on: str) -> None:
    changes: list[dict[str, Any]] = [{"logprobs": 2, "top_k": 3, "top_p": 0.5}, {"allowed_token_ids": [3]}, {}]
    ends = [np.nan], [-np.nan], [np.inf], [-np.inf], [np.inf, np.nan], [np.nan, np.inf], [0.0, np.inf]
    rows = []
    for config in [*changes, {"temperature": 0.0}]:
        for values in ends:
            rows.append(Row(np.zeros(70, np.float32), config))
            rows[-1].logits[66 : 66 + len(values)] = values
        rows.append(Row(np.full(70, -np.inf, np.float32), config))
    rows += [Row(row.logits, {"logprobs": 2}, token=4) for row in rows[: len(ends) + 1]]
    errors = [error_of(row.expected) for row in rows]
    kinds = {error.partition(":")[0].partition(" may be")[0] for error in errors}
    bad = {f"the logit of token {name}" for name in ("66 is NaN", "66 is infinite", "67 is infinite")}
    assert kinds == {"", "none of the 70 tokens", *bad}
    assert [error_of(each.result) for each in compute(rows, on)] == errors


def test_the_most_likeliest_tokens_are_reported(on: str) -> None:
    logits, most = np.arange(999, dtype=np.float32) % 300, SampleRow.MOST_TOP
    found = check([Row(logits, {"logprobs": count, "seed": 1}) for count in (most, most + 1, 499)], on)
    assert [len(row.result["top_ids"]) for row in found] == [most, most + 1, 499]


@pytest.mark.parametrize("vocabulary", [700, 4099, 20_000])
def test_many_likeliest_tokens_are_those_of_the_host(vocabulary: int, on: str) -> None:
    random = np.random.default_rng(vocabulary)
    rows = rows_of(random, vocabulary, 12 if on == CUDA else 100)
    rows = [row for row in rows if not error_of(row.expected)]
    for row in rows:
        row.config["logprobs"] = int(random.integers(SampleRow.MOST_TOP + 1, vocabulary // 2 + 1))
    changed = [edited(random, row, 0.8) for row in rows] + [constrained(random, row) for row in rows]
    check([*rows, *(row for row in changed if not error_of(row.expected))], on)


def test_samples_from_a_large_vocabulary(on: str) -> None:
    random = np.random.default_rng(0)
    rows = rows_of(random, 151_936, 4)
    changed = [edited(random, row, 0.8) for row in rows] + [constrained(random, row) for row in rows]
    check([*rows, *(row for row in changed if not error_of(row.expected))], on)
