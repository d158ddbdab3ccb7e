"""Kernels for AMX give the same bits as FMA kernels: on AMX itself, and elsewhere on tiles in software."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soft_tiles

from quire.kernels import host, options, runner

Outputs = list[tuple[list[int], list[float]]]


def generate(
    model: str, lengths: tuple[int, ...], chunk: int, isa: str | None, quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> Outputs:  # fmt: skip
    """Return tokens and logprobs of 6 greedy steps after each prompt."""
    chosen = options.LoadOptions(
        model, dtype="bfloat16", num_pages=64, threads=2, max_num_batched_tokens=chunk, isa=isa,
        quantization=quantization, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    engine = runner.load_model(chosen)
    outputs: Outputs = []
    for length in lengths:
        prompt = np.random.default_rng(length).integers(0, engine.vocab_size, length).tolist()
        slot = engine.sequences.open(prompt, length, sampling=runner.SamplingConfig(temperature=0.0, logprobs=2))
        assert engine.sequences.reserve(slot, length + 6)
        tokens: list[int] = []
        values: list[float] = []
        done = 0
        while len(tokens) < 6:
            count = min(chunk, length + len(tokens) - done)
            result = engine.step([slot], [done], [count])
            done += count
            if result.token_ids[0]:
                tokens += result.token_ids[0]
                entries = result.logprobs(0)
                assert entries is not None
                values += entries[0][1]
        outputs.append((tokens, values))
        engine.sequences.close(slot)
    assert engine.sequences.free_pages == engine.num_pages
    return outputs


@pytest.fixture
def soft_amx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    soft_tiles.load_library(tmp_path)
    monkeypatch.setattr(runner, "Jit", soft_tiles.SoftJit)
    monkeypatch.setattr(host, "choose_isa", soft_tiles.choose_amx)


CASES: list[tuple[int, tuple[int, ...], dict[str, str]]] = [
    (7, (1, 2, 17, 70, 290), {}),
    (512, (1, 2, 17, 70, 290), {}),
    (64, (1, 70), {"quantization": "int8", "kv_cache_dtype": "int8"}),
    (7, (1, 40), {"quantization": "int4"}),
    (64, (1, 40), {"quantization": "int4-g32"}),
]


@pytest.mark.parametrize(("chunk", "lengths", "formats"), CASES)
def test_tiles_in_software_give_the_bits_of_fma(
    demo_model: Path, chunk: int, lengths: tuple[int, ...], formats: dict[str, str], request: pytest.FixtureRequest
) -> None:
    expected = generate(str(demo_model), lengths, 512, "avx2", **formats)
    request.getfixturevalue("soft_amx")
    assert generate(str(demo_model), lengths, chunk, None, **formats) == expected


@pytest.mark.skipif("amx" not in host.available_isas(), reason="this host has no AMX")
@pytest.mark.parametrize(("chunk", "lengths", "formats"), CASES)
def test_amx_gives_the_bits_of_fma(
    demo_model: Path, chunk: int, lengths: tuple[int, ...], formats: dict[str, str]
) -> None:
    model = str(demo_model)
    assert generate(model, lengths, chunk, "amx", **formats) == generate(model, lengths, 512, "avx512", **formats)
