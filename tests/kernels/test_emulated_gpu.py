"""A GPU gives the bits of the CPU: the driver is emulated, and runs the very PTX that a GPU would."""

from __future__ import annotations

from pathlib import Path

import emulated_gpu
import greedy_steps
import pytest

from quire.kernels import _native, options, runner
from quire.kernels.errors import ModelError


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulated_gpu.use(monkeypatch, tmp_path)


def generate(device: str, model: Path, chunk: int, formats: dict[str, str]) -> greedy_steps.Outputs:
    """Return tokens and log probabilities of greedy steps after prompts, which are computed in chunks."""
    chosen = options.LoadOptions(
        str(model), dtype="bfloat16", num_pages=64, threads=2, max_num_batched_tokens=chunk, device=device,
        quantization=formats.get("quantization"), kv_cache_dtype=formats.get("kv_cache_dtype", "auto"),
    )  # fmt: skip
    return greedy_steps.generate(chosen, (1, 17, 70))


@pytest.mark.parametrize(
    ("chunk", "formats"),
    [(512, {}), (7, {}), (64, {"quantization": "int8", "kv_cache_dtype": "int8"}), (64, {"quantization": "int4"})],
    ids=str,
)
def test_it_gives_the_bits_of_the_cpu(demo_model: Path, chunk: int, formats: dict[str, str]) -> None:
    assert generate("cuda", demo_model, chunk, formats) == generate("cpu", demo_model, 512, formats)


def test_memory_of_files_cannot_be_had() -> None:
    device = _native.CudaDevice(0, _native.ThreadPool(1, False))
    assert (device.name, device.architecture) == ("Emulated GPU", "sm_90")
    with pytest.raises(RuntimeError, match="memory of files"):
        device.map_file(0, 4096, False)


def test_ptx_that_the_driver_rejects_is_an_error() -> None:
    device = _native.CudaDevice(0, _native.ThreadPool(1, False))
    with pytest.raises(RuntimeError, match="the GPU failed to compile a kernel: CUDA_ERROR, the emulated driver"):
        device.load("nonsense", "entry")


def test_a_gpu_that_is_not_there_is_an_error(demo_model: Path) -> None:
    with pytest.raises(ModelError, match=r"cuda:3 can't be used: there is no GPU number 3: this machine has 1"):
        runner.load_model(options.LoadOptions(str(demo_model), device="cuda:3"))


def test_a_gpu_without_shared_access_is_an_error(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_EMULATED_MANAGED", "no")
    with pytest.raises(ModelError, match="Emulated GPU and the host can't access the same memory at a time"):
        runner.load_model(options.LoadOptions(str(demo_model), device="cuda"))
