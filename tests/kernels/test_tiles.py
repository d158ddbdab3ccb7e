"""Kernels for AMX, AVX512-BF16 and NEON give the bits of FMA kernels: on those units, and elsewhere in software."""

from __future__ import annotations

from pathlib import Path

import greedy_steps
import pytest
import soft_tiles

from quire.kernels import options
from quire.kernels.devices.instruction_sets import available_isas


def generate(
    model: str, lengths: tuple[int, ...], chunk: int, isa: str | None, quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> greedy_steps.Outputs:  # fmt: skip
    """Return tokens and logprobs of 6 greedy steps after each prompt."""
    chosen = options.LoadOptions(
        model, dtype="bfloat16", num_pages=64, threads=2, max_num_batched_tokens=chunk, isa=isa,
        quantization=quantization, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    return greedy_steps.generate(chosen, lengths)


CASES: list[tuple[int, tuple[int, ...], dict[str, str]]] = [
    (7, (1, 2, 17, 70, 290), {}),
    (512, (1, 2, 17, 70, 290), {}),
    (64, (1, 70), {"quantization": "int8", "kv_cache_dtype": "int8"}),
    (64, (3, 290), {"kv_cache_dtype": "int8"}),
    (7, (1, 40), {"quantization": "int4"}),
]


@pytest.mark.parametrize("isa", ["amx", "avx512-bf16", "neon-dotprod"])
@pytest.mark.parametrize(("chunk", "lengths", "formats"), CASES)
def test_units_give_the_bits_of_fma(
    demo_model: Path, chunk: int, lengths: tuple[int, ...], formats: dict[str, str], isa: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    expected = generate(str(demo_model), lengths, 512, "avx2", **formats)
    if isa not in available_isas():
        soft_tiles.use(monkeypatch, tmp_path, isa)
    assert generate(str(demo_model), lengths, chunk, isa, **formats) == expected
