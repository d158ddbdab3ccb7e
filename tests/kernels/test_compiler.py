"""Kernels with the same code are compiled once, whichever model and instruction set they are for."""

from __future__ import annotations

from pathlib import Path

from quire.kernels.compiler import Compiler
from quire.kernels.emit.gemm import GemmKernel
from quire.kernels.emit.layout import Dtypes
from quire.kernels.emit.rows import NormKernel
from quire.kernels.host import INSTRUCTION_SETS
from quire.kernels.weights.quantization import MODES

DTYPES = Dtypes("bf16", "bf16", "f32")


def compiler(isa: str, cache: Path) -> Compiler:
    return Compiler(INSTRUCTION_SETS[isa], cache)


def test_the_cache_shares_a_kernel_between_plans_and_instruction_sets(tmp_path: Path) -> None:
    first, others = compiler("avx2", tmp_path), [compiler(isa, tmp_path) for isa in ("avx2", "avx2-vnni")]
    first.compile(NormKernel("norm_1", 64, 1e-5), DTYPES)
    for other in others:
        other.compile(NormKernel("norm_7", 64, 1e-5), DTYPES)
    assert [each.compiled for each in (first, *others)] == [1, 0, 0]


def test_the_cache_tells_cpus_dtypes_and_units_apart(tmp_path: Path) -> None:
    norm, product = NormKernel("norm", 64, 1e-5), GemmKernel("linear", 64, 32, quantized=MODES["int8"].body)
    made = [compiler(isa, tmp_path) for isa in ("avx2", "avx512", "avx2", "avx2-vnni")]
    addresses = [
        each.compile(kernel, dtypes)
        for each, kernel, dtypes in zip(
            made, (norm, norm, norm, product), (DTYPES, DTYPES, Dtypes("f32", "f32", "f32"), DTYPES), strict=True
        )
    ]
    assert [each.compiled for each in made] == [1, 1, 1, 1]
    assert len(set(addresses)) == 4
    again = compiler("avx2", tmp_path)
    again.compile(product, DTYPES)
    assert again.compiled == 1


def test_entries_that_are_damaged_are_named(tmp_path: Path) -> None:
    norm = NormKernel("norm", 64, 1e-5)
    compiler("avx2", tmp_path).compile(norm, DTYPES)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(b"nothing")
    again = compiler("avx2", tmp_path)
    again.compile(norm, DTYPES)
    assert again.compiled == 1
    assert len(again.rejected) == 1
    assert str(entry) in again.rejected[0]
