"""Kernels for GPUs: all of them compile to PTX that keeps the numeric contract; test_emulated_gpu.py compares bits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import assembled
import msgspec
import pytest
from checkpoints import CHECKPOINTS, ReferenceCheckpoint
from kernel_calls import context_of
from pooled_checkpoints import CLASSIFIERS, ENCODERS, PooledCheckpoint, make

from quire.kernels.attention_heads import Heads, StateHeads
from quire.kernels.devices.cuda import ARCHITECTURES, Cuda, local_bytes
from quire.kernels.emit.attention import AttentionKernel
from quire.kernels.emit.context import Kernel
from quire.kernels.emit.cuda.choice import gpu_kernel
from quire.kernels.emit.cuda.threads import ENTRY, SHARED_BYTES
from quire.kernels.emit.dots import CUDA
from quire.kernels.emit.experts import CombineKernel
from quire.kernels.emit.gates import CutoffKernel, GatedNormKernel
from quire.kernels.emit.gemm import GemmKernel
from quire.kernels.emit.layout import Dtypes, QuantizedFormat
from quire.kernels.emit.rows import NormKernel
from quire.kernels.emit.state_update import StateUpdateKernel, UnitHeadsKernel
from quire.kernels.emit.streams import CorrectKernel, PredictKernel, RescaleKernel
from quire.kernels.errors import ModelError
from quire.kernels.options import LoadOptions, choose_device
from quire.kernels.runner import describe, load_model

ROUNDED = re.compile(r"(fma|add|sub|mul|div|rcp|sqrt)\.rn\.ftz\.f32(x2)?")
"""Operations that round to nearest, each by itself, with denormals as zero; `x2`: of two lanes."""

MOST_REGISTERS = 255
MOST_SPILLED_BYTES = 512  # of a thread: what loops do not change, so that two blocks of threads fit a multiprocessor
MOST_SPILLED_OF_PAIRS = 704  # from sm_100 on, where LLVM pairs f32 operations; int8 KV takes the most

EXACT = re.compile(r"(ld|st|mov|selp|cvt|setp|min|max|neg|abs|copysign)\..*")


def compiled(options: LoadOptions) -> list[tuple[Kernel, str]]:
    """Return the kernels of a plan with their PTX."""
    plan, _ = describe(options)
    gpu = choose_device(options)
    assert isinstance(gpu, Cuda)
    return [(kernel, gpu.ptx(kernel, plan.context)) for kernel in plan.kernels]


def check(kernels: list[tuple[Kernel, str]], architecture: str, *, fast_matmul: bool = False) -> None:
    """Check the PTX of kernels."""
    found = set()
    for kernel, ptx in kernels:
        assert f".target {architecture}" in ptx
        assert f".visible .entry {ENTRY}(" in ptx
        operations = set(re.findall(r"^\s+(?:@\S+\s+)?([a-z]\w*(?:\.\w+)*\.f32(?:x2)?)\s", ptx, re.MULTILINE))
        unsafe = {name for name in operations if not ROUNDED.fullmatch(name) and not EXACT.fullmatch(name)}
        found |= unsafe
        assert not unsafe or (fast_matmul and isinstance(kernel, GemmKernel)), kernel.name
        assert ".extern .func" not in ptx, kernel.name  # nothing that no GPU has
    assert found == ({"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"} if fast_matmul else set())


def assemble(options: LoadOptions, architecture: str) -> None:
    """Have NVIDIA's assembler find out whether a GPU of an architecture can run kernels, and what they take of it."""
    assembled.assembler()
    for kernel, ptx in compiled(replace(options, device=f"cuda:{architecture}")):
        found = assembled.resources(ptx)
        assert 0 < found["registers"] <= MOST_REGISTERS, kernel.name
        assert found["shared_bytes"] <= SHARED_BYTES, kernel.name
        if local_bytes(ptx) == 0:  # else a thread computes the item alone
            most = MOST_SPILLED_OF_PAIRS if architecture == "sm_120" else MOST_SPILLED_BYTES
            assert found["spilled_bytes"] <= most, kernel.name


FORMATS = pytest.mark.parametrize(
    "formats", [{}, {"quantization": "int8", "kv_cache_dtype": "int8"}, {"quantization": "int4"}], ids=str
)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda checkpoint: checkpoint.name)
def test_every_architecture_compiles(checkpoint: ReferenceCheckpoint, checkpoints: Path) -> None:
    options = LoadOptions(str(checkpoints / checkpoint.name), dtype="bfloat16", device="cuda:sm_90")
    check(compiled(options), "sm_90")


POOLED = pytest.mark.parametrize("checkpoint", [*ENCODERS, *CLASSIFIERS], ids=lambda checkpoint: checkpoint.name)


@POOLED
def test_every_encoder_and_classifier_compiles(checkpoint: PooledCheckpoint, tmp_path: Path) -> None:
    options = LoadOptions(str(make(checkpoint, tmp_path)), dtype="bfloat16", device="cuda:sm_90")
    check(compiled(options), "sm_90")


@POOLED
def test_every_encoder_and_classifier_can_be_assembled(checkpoint: PooledCheckpoint, tmp_path: Path) -> None:
    assemble(LoadOptions(str(make(checkpoint, tmp_path)), dtype="bfloat16"), "sm_90")


@pytest.mark.parametrize(
    ("checkpoint", "architecture", "kv"),
    [
        pytest.param(checkpoint, architecture, kv, id=f"{checkpoint.name}-{architecture}-{kv}")
        for checkpoint in CHECKPOINTS
        for architecture, kv in (("sm_90", "auto"), ("sm_80", "int8"), ("sm_120", "int8"))
    ],
)
def test_every_architecture_can_be_assembled(
    checkpoint: ReferenceCheckpoint, architecture: str, kv: str, checkpoints: Path
) -> None:
    assemble(LoadOptions(str(checkpoints / checkpoint.name), dtype="bfloat16", kv_cache_dtype=kv), architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@FORMATS
def test_every_format_compiles(demo_model: Path, formats: dict[str, str], architecture: str) -> None:
    check(compiled(LoadOptions(str(demo_model), device=f"cuda:{architecture}", **formats)), architecture)  # type: ignore[arg-type]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@FORMATS
def test_every_format_can_be_assembled(demo_model: Path, formats: dict[str, str], architecture: str) -> None:
    assemble(LoadOptions(str(demo_model), **formats), architecture)  # type: ignore[arg-type]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_products_on_tensor_cores_compile(demo_model: Path, architecture: str) -> None:
    options = LoadOptions(str(demo_model), device=f"cuda:{architecture}", fast_matmul=True)
    check(compiled(options), architecture, fast_matmul=True)
    assemble(options, architecture)


@pytest.mark.parametrize("name", ["qwen3-moe", "gemma3-window100"])
def test_kernels_of_adapters_compile(name: str, checkpoints: Path) -> None:
    options = LoadOptions(
        str(checkpoints / name), dtype="bfloat16", device="cuda:sm_90", quantization="int8", max_loras=2
    )
    kernels = compiled(options)
    assert {"OwnColumnsKernel", "HeadKernel", "ShrinkKernel"} <= {type(kernel).__name__ for kernel, _ in kernels}
    check(kernels, "sm_90")


def test_kernels_of_adapters_can_be_assembled(checkpoints: Path) -> None:
    options = LoadOptions(str(checkpoints / "qwen3-moe"), dtype="bfloat16", quantization="int8", max_loras=2)
    assemble(options, "sm_90")


def test_a_second_start_compiles_nothing(demo_model: Path, tmp_path: Path) -> None:
    plan, _ = describe(LoadOptions(str(demo_model), device="cuda:sm_90"))
    kernel = next(kernel for kernel in plan.kernels if isinstance(kernel, NormKernel))
    first, second = Cuda("sm_90", tmp_path), Cuda("sm_90", tmp_path)
    assert first.ptx(kernel, plan.context) == second.ptx(kernel, plan.context)
    assert (first.compiled, second.compiled) == (1, 0)
    other = Cuda("sm_80", tmp_path)
    assert other.ptx(kernel, plan.context) != first.ptx(kernel, plan.context)
    assert other.compiled == 1


@pytest.mark.parametrize(
    ("kernel", "threads"),
    [
        (GemmKernel("g", 64, 32), 512),
        (GemmKernel("g", 64, 8160, quantized=QuantizedFormat(8)), 512),
        (GemmKernel("g", 64, 8192), 256),
        (GemmKernel("g", 64, 32, "gate", activation="silu"), 256),
        (AttentionKernel("a", Heads(8, 2, 128), 0.1), 256),
        (AttentionKernel("a", Heads(20, 1, 576, 512), 0.1), 256),
        (CombineKernel("c", 64, 2), 256),
        (GatedNormKernel("n", 512, 256, 256, 512, 0, 1e-6), 256),
        (GatedNormKernel("n", 512, 128, 128, 512, 0, 1e-6), 16),
        (StateUpdateKernel("u", StateHeads(1, 1, 256, 16), 528, 0, 256, 512), 64),
        (UnitHeadsKernel("u", StateHeads(1, 1, 256, 16), 528, 1.0, 1e-6), 16),
        (AttentionKernel("a", Heads(128, 1, 576, 512), 0.1), 256),
        (CutoffKernel("c", 16384, 1.6), 256),
        (PredictKernel("p", 2048, 4), 256),
        (CorrectKernel("c", 2048, 4, True), 256),
        (RescaleKernel("r", 2048), 256),
    ],
    ids=str,
)
def test_a_kernel_has_the_threads_that_its_items_can_use(kernel: Kernel, threads: int) -> None:
    chosen = gpu_kernel(kernel, context_of(CUDA, Dtypes("bf16", "bf16", "f32")))
    assert chosen.shape.threads_per_item == threads


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("weights", "quantized"),
    [
        ("bf16", None),
        ("f32", None),
        ("bf16", QuantizedFormat(8)),
        ("bf16", QuantizedFormat(4, 32, zeros=True)),
        ("bf16", QuantizedFormat.of_gguf("Q2_K")),
    ],
    ids=str,
)
def test_products_have_registers_for_two_blocks_of_threads(
    weights: str, quantized: QuantizedFormat | None, architecture: str, tmp_path: Path
) -> None:
    """What does not fit does not change in the loop over k; sums would take many times as much."""
    context = context_of(CUDA, Dtypes(weights, weights, "f32"))
    ptx = Cuda(architecture, tmp_path).ptx(GemmKernel("g", 4096, 4096, quantized=quantized), context)
    taken = assembled.resources(ptx)
    assert taken["registers"] <= 128
    assert taken["spilled_bytes"] < 300
    assert taken["shared_bytes"] <= 48 << 10


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_attention_over_latents_of_many_heads_can_be_assembled(split: bool, architecture: str, tmp_path: Path) -> None:
    """The heads are those of DeepSeek-V3. No thread has local memory, of which all that may run would take 100 GB."""
    kernel = AttentionKernel("a", Heads(128, 1, 576, 512), 0.1, kv_split=split)
    ptx = Cuda(architecture, tmp_path).ptx(kernel, context_of(CUDA, Dtypes("bf16", "bf16", "f32")))
    assert local_bytes(ptx) == 0
    taken = assembled.resources(ptx)
    assert taken["registers"] <= 128
    assert taken["spilled_bytes"] <= MOST_SPILLED_BYTES


@pytest.mark.parametrize("device", ["cuda:sm_1", "cuda:sm_75", "cuda:x", "cuda:-1", "gpu", "cpu:0", "cuda:sm_90 "])
def test_an_unknown_device_is_an_error_that_names_known_ones(demo_model: Path, device: str) -> None:
    with pytest.raises(ModelError, match=r"sm_90"):
        describe(LoadOptions(str(demo_model), device=device))


def test_an_architecture_alone_computes_nothing(demo_model: Path) -> None:
    with pytest.raises(ModelError, match="cuda:sm_90 is an architecture; give a GPU's number to run a model"):
        load_model(LoadOptions(str(demo_model), device="cuda:sm_90"))


def test_a_machine_without_a_driver_says_so_in_one_line(demo_model: Path, tmp_path: Path) -> None:
    """In a process of its own, which has not loaded an emulated driver."""
    (tmp_path / "libcuda.so.1").write_text("no library")
    code = "import sys; from quire.kernels import options, runner\n"
    code += "runner.load_model(options.LoadOptions(sys.argv[1], device='cuda'))"
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-c", code, str(demo_model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "device cuda:0 can't be used: " in done.stderr
    assert "libcuda.so.1" in done.stderr.splitlines()[-1]


def test_info_prints_the_sizes_of_kernels(demo_model: Path) -> None:
    options = ["--max-loras", "1", "--model", str(demo_model), "--device", "cuda:sm_90"]
    command = [sys.executable, "-m", "quire.kernels.info", *options]
    done = subprocess.run(command, capture_output=True, check=True)
    plan = msgspec.json.decode(done.stdout)["plan"]
    assert plan["device"] == "cuda:sm_90"
    assert plan["device_kernels"].keys() >= plan["kernels"].keys()
    assert all(kernel["ptx_bytes"] > 0 for kernel in plan["device_kernels"].values())
    shrink, linear = (next(name for name in plan["kernels"] if part in name) for part in ("shrink", "linear"))
    assert plan["device_kernels"][shrink]["threads_per_block"] == 64
    assert plan["device_kernels"][linear]["threads_per_block"] == 256
    failed = subprocess.run([*command[:-1], "cuda:sm_0"], capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stderr.count("\n")) == (1, 1)
    assert "cuda:sm_0" in failed.stderr or "'sm_0'" in failed.stderr


def test_local_memory_is_that_of_the_stack() -> None:
    depots = ".local .align 64 .b8 \t__local_depot0[256];\n.local .align 16 .b8 \t__local_depot1[48];\n"
    assert local_bytes(depots) == 304
    assert local_bytes(".shared .align 16 .b8 tile[128];") == 0
