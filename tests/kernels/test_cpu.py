"""The CPU as a device: equal kernels are compiled once, and no bits depend on how it divides work."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.kernels._native import CpuDevice, SamplingConfig, ThreadPool
from quire.kernels.devices.cpu import Cpu
from quire.kernels.devices.instruction_sets import INSTRUCTION_SETS
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.gemm import GemmKernel
from quire.kernels.emit.layout import Dtypes
from quire.kernels.emit.rows import NormKernel
from quire.kernels.errors import ModelError
from quire.kernels.options import LoadOptions
from quire.kernels.runner import load_model
from quire.kernels.step import StepInput
from quire.kernels.weights.quantization import MODES

DTYPES = Dtypes("bf16", "bf16", "f32")


class Compiler(Cpu):
    """Compiles for an instruction set, whether this host has it or not."""

    def __init__(self, isa: str, cache: Path) -> None:
        super().__init__(INSTRUCTION_SETS[isa], cache)

    def run(self, kernel: Kernel, dtypes: Dtypes = DTYPES) -> int:
        (address,) = self.compile([kernel], EmitContext(self.capabilities, dtypes))
        return address


def test_the_cache_shares_a_kernel_between_plans_and_instruction_sets(tmp_path: Path) -> None:
    first, others = Compiler("avx2", tmp_path), [Compiler(isa, tmp_path) for isa in ("avx2", "avx2-vnni")]
    first.run(NormKernel("norm_1", 64, 1e-5))
    for other in others:
        other.run(NormKernel("norm_7", 64, 1e-5))
    assert [each.compiled for each in (first, *others)] == [1, 0, 0]


def test_the_cache_tells_cpus_dtypes_and_units_apart(tmp_path: Path) -> None:
    norm, product = NormKernel("norm", 64, 1e-5), GemmKernel("linear", 64, 32, quantized=MODES["int8"].body)
    made = [Compiler(isa, tmp_path) for isa in ("avx2", "avx512", "avx2", "avx2-vnni")]
    addresses = [
        each.run(kernel, dtypes)
        for each, kernel, dtypes in zip(
            made, (norm, norm, norm, product), (DTYPES, DTYPES, Dtypes("f32", "f32", "f32"), DTYPES), strict=True
        )
    ]
    assert [each.compiled for each in made] == [1, 1, 1, 1]
    assert len(set(addresses)) == 4
    again = Compiler("avx2", tmp_path)
    again.run(product)
    assert again.compiled == 1


def test_entries_that_are_damaged_are_named(tmp_path: Path) -> None:
    norm = NormKernel("norm", 64, 1e-5)
    Compiler("avx2", tmp_path).run(norm)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(b"nothing")
    again = Compiler("avx2", tmp_path)
    again.run(norm)
    assert again.compiled == 1
    assert len(again.rejected) == 1
    assert str(entry) in again.rejected[0]


def log_probabilities(model: Path) -> list[list[float]]:
    """Return those of a prompt's tokens, some of which are computed in a step of one row."""
    engine = load_model(LoadOptions(str(model), num_pages=16, threads=2))
    prompt = [int(token) for token in np.random.default_rng(0).integers(0, engine.vocab_size, 300)]
    slot = engine.sequences.open(prompt, len(prompt), sampling=SamplingConfig(temperature=0.0, prompt_logprobs=2))
    assert engine.sequences.reserve(slot, len(prompt) + 1)
    steps = [engine.run(StepInput([slot], [start], [count])) for start, count in ((0, 270), (270, 29), (299, 1))]
    return [entry[1] for step in steps for entry in step.prompt_logprobs.get(0, ())]


@pytest.mark.parametrize("sizes", [(16, 16), (48, 80), (512, 128)])
def test_bits_do_not_depend_on_capabilities(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]
) -> None:
    expected = log_probabilities(demo_model)
    assert len(expected) == 299
    rows, query_rows = sizes
    changes = {"product_rows": rows, "tile_product_rows": rows, "query_rows": query_rows}
    monkeypatch.setattr(Cpu, "capabilities", property(lambda cpu: replace(cpu.isa.capabilities, **changes)))
    assert log_probabilities(demo_model) == expected


def test_page_lists_are_read_where_they_are() -> None:
    pages = np.array([3, 1, 2], np.int32)
    found = ctypes.c_int32 * len(pages)
    assert [*found.from_address(CpuDevice(ThreadPool(1)).page_list(pages))] == [3, 1, 2]


def test_threads_without_a_cpu_each_are_rejected(tmp_path: Path) -> None:
    cpu = Cpu(INSTRUCTION_SETS["avx2"], tmp_path, len(os.sched_getaffinity(0)) + 1, pin_threads=True)
    with pytest.raises(ModelError, match="can't be bound to a CPU each"):
        _ = cpu.native
