"""What a GPU's driver can't do: errors keep its words, nothing is lost with them, and `auto` goes to the CPU."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulated_gpu
import greedy_steps
import pytest
import tiny_model
from kernel_calls import context_of

from quire.kernels import _native, runner
from quire.kernels.adapters.blocks import Blocks
from quire.kernels.devices import choice
from quire.kernels.devices.cuda import Cuda
from quire.kernels.emit.dots import CUDA
from quire.kernels.emit.layout import Dtypes
from quire.kernels.emit.rows import NormKernel
from quire.kernels.errors import ModelError
from quire.kernels.options import LoadOptions, choose_device

MIB = 1 << 20
TOO_OLD = {"QUIRE_EMULATED_MAJOR": "7"}
UNSHARED = {"QUIRE_EMULATED_UNIFIED": "no"}
UNUSABLE = pytest.mark.parametrize(
    ("environment", "words"),
    [
        (TOO_OLD, "Emulated GPU has compute capability 7.0, and 8.0 or a later one is needed"),
        (UNSHARED, "Emulated GPU and the host have no addresses in common (unified addressing), which is needed"),
    ],
    ids=["too old", "no shared addresses"],
)
LOCAL = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry entry(
	.param .u64 entry_param_0,
	.param .u64 entry_param_1,
	.param .u64 entry_param_2
)
{
	.local .align 16 .b8 	__local_depot0[%d];
	ret;
}
"""


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Give this process a GPU, of which nothing is known yet."""
    choice.resolve_device.cache_clear()
    emulated_gpu.use(monkeypatch, tmp_path)
    yield
    choice.resolve_device.cache_clear()


def device() -> _native.CudaDevice:
    return _native.CudaDevice(0, _native.ThreadPool(1, False))


def set_all(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@UNUSABLE
def test_auto_is_the_cpu_where_a_gpu_cannot_be_used(
    environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_all(monkeypatch, environment)
    with caplog.at_level(logging.INFO):
        chosen = [choose_device(LoadOptions("model", device="auto")).name for _ in range(2)]
    assert chosen == ["cpu", "cpu"]
    assert caplog.messages == [f"device auto is cpu: cuda:0 (Emulated GPU) can't be used: {words}"]


def test_a_gpu_newer_than_llvm_knows_has_the_kernels_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = LoadOptions(str(tiny_model.write(tmp_path / "tiny", tiny_model.weights())), num_pages=8, threads=1)
    expected = greedy_steps.generate(model, (1, 17))
    monkeypatch.setenv("QUIRE_EMULATED_MAJOR", "77")
    assert greedy_steps.generate(replace(model, device="cuda"), (1, 17)) == expected
    assert "cuda:0: LLVM does not know sm_770; kernels are compiled for sm_120" in caplog.messages


@UNUSABLE
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_gpu_that_is_named_and_cannot_be_used_is_an_error(
    name: str, environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_all(monkeypatch, environment)
    model = tiny_model.write(tmp_path / "tiny", tiny_model.weights())
    with pytest.raises(ModelError) as failed:
        runner.load_model(LoadOptions(str(model), device=name, num_pages=4))
    assert str(failed.value) == f"device cuda:0 can't be used: {words}; give the device cpu"


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize(
    ("code", "error"),
    [
        (2, MemoryError),
        (1, RuntimeError),
        (701, RuntimeError),
        *((code, _native.DeviceLostError) for code in (4, 46, 201, 214, 220, 226, 700, 702, 719, 999)),
    ],
)
def test_a_failed_allocation_keeps_the_drivers_error(
    code: int, error: type[Exception], exchanged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one that lacks memory is a MemoryError, and a lost GPU is seen as such."""
    gpu = device()
    monkeypatch.setenv("QUIRE_EMULATED_ALLOCATION", str(code))
    with pytest.raises(error) as failed:
        (gpu.allocate_exchanged if exchanged else gpu.allocate)(MIB)
    assert type(failed.value) is error
    words = f"{MIB} bytes" if code == 2 else f"the GPU failed to allocate memory: CUDA_ERROR_{code}, "
    assert words in str(failed.value)


POOLS = pytest.mark.parametrize("pools", [True, False], ids=["pool", "no pool"])


@POOLS
def test_an_allocation_that_fails_halfway_leaves_nothing(pools: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not pools:
        monkeypatch.setenv("QUIRE_EMULATED_POOLS", "no")
    gpu = device()
    blocks, free = Blocks(gpu), gpu.free_memory
    monkeypatch.setenv("QUIRE_EMULATED_CLEAR", "1")
    with pytest.raises(RuntimeError, match="failed to clear memory: CUDA_ERROR_1"):
        blocks.take(3 * MIB)
    assert gpu.free_memory == free
    monkeypatch.delenv("QUIRE_EMULATED_CLEAR")
    block = blocks.take(3 * MIB)
    assert free - gpu.free_memory == 4 * MIB
    address = block.address
    del block
    assert blocks.take(4 * MIB).address == address


@POOLS
def test_all_that_is_free_can_be_allocated_and_nothing_else(pools: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver's pool keeps is free, and the next engine gets it."""
    monkeypatch.setenv("QUIRE_EMULATED_OTHERS", str((8 << 10) - 64))
    if not pools:
        monkeypatch.setenv("QUIRE_EMULATED_POOLS", "no")
    gpu = device()
    before = gpu.free_memory
    assert before == 64 * MIB
    gpu.allocate(24 * MIB)
    assert gpu.free_memory == before - 24 * MIB
    with monkeypatch.context() as patch:
        patch.setenv("QUIRE_EMULATED_CLEAR", "1")
        with pytest.raises(RuntimeError, match="failed to clear memory"):
            gpu.allocate(40 * MIB)
    assert gpu.free_memory == before - 24 * MIB
    with pytest.raises(MemoryError, match=f"{41 * MIB} bytes"):
        gpu.allocate(41 * MIB)
    gpu.allocate(40 * MIB)
    assert gpu.free_memory == 0
    del gpu
    assert device().free_memory == before


@POOLS
def test_a_process_ends_in_peace_after_its_gpu(pools: bool, tmp_path: Path) -> None:
    """What frees memory has no error to raise, whatever the driver says."""
    code = "import os; from quire.kernels import _native\n"
    code += "gpu = _native.CudaDevice(0, _native.ThreadPool(1, False)); gpu.allocate(100)\n"
    code += "os.environ['QUIRE_EMULATED_LOST_CONTEXT'] = 'yes'; del gpu; print('ended')"
    (folder := tmp_path / "driver").mkdir()
    environment = os.environ | emulated_gpu.build(folder) | ({} if pools else {"QUIRE_EMULATED_POOLS": "no"})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def test_kernels_that_wait_are_not_compiled_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, tried = Cuda("0", tmp_path), []

    class Compiler:
        def compile(self, text: str) -> str:
            tried.append(text)
            raise RuntimeError("no")

    monkeypatch.setattr(gpu, "_compiler", Compiler(), raising=False)
    kernels = [NormKernel(f"n{width}", width, 1e-6) for width in range(320, 960, 32)]
    with pytest.raises(RuntimeError, match=r"^no$"):
        list(gpu.compile(kernels, context_of(CUDA, Dtypes("bf16", "bf16", "f32"))))
    assert 1 <= len(tried) < len(kernels)


def test_local_memory_is_that_of_all_threads_that_run_at_a_time() -> None:
    gpu = device()
    assert gpu.thread_memory == 0
    for size in (48, 1024, 256):
        gpu.load(LOCAL % size, "entry", 1, 32)
    assert gpu.thread_memory == 1024 * 4 * 2048


def test_local_memory_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 GiB that are free, of which engines take 9 tenths, threads have most or more than all."""
    options: dict[str, Any] = {"device": "cuda", "threads": 1}
    model = str(tiny_model.write(tmp_path / "tiny", tiny_model.weights()))
    monkeypatch.setattr(Cuda, "thread_memory", property(lambda _: 3 << 30))
    found = runner.load_model(LoadOptions(model, **options))
    assert 0 < found.kv_bytes < 0.9 * (4 << 30) - (3 << 30)
    monkeypatch.setattr(Cuda, "thread_memory", property(lambda _: 5 << 30))
    with pytest.raises(ModelError, match=r"weights, buffers and local memory of threads take 5\d+ bytes, but 4"):
        runner.load_model(LoadOptions(model, **options))


def test_tests_of_a_gpu_are_skipped_where_no_cpu_can_stand_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(pytest.skip.Exception, match=r"needs an x86-64 CPU .* this is aarch64"):
        emulated_gpu.build(tmp_path)
