"""Copies between the memory of a GPU and of the host, of any size and by any thread."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import emulated_gpu
import numpy as np
import pytest

from quire.kernels._native import CpuDevice, CudaDevice, MatrixView, PackedWeights, ThreadPool

MIB = 1 << 20
LANE = 4 * MIB


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CudaDevice:
    emulated_gpu.use(monkeypatch, tmp_path)
    return CudaDevice(0, ThreadPool(2, False))


def content(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def read(gpu: CudaDevice, address: int, size: int) -> np.ndarray:
    result = np.full(size, 77, np.uint8)
    gpu.read(address, result)
    return result


@pytest.mark.parametrize("size", [0, 1, MIB, LANE, LANE + 1, 5 * LANE + 17])
def test_what_is_written_is_read(gpu: CudaDevice, size: int) -> None:
    given = content(size)
    address = gpu.upload(given)
    assert np.array_equal(read(gpu, address, size), given)
    gpu.write(address, given[::-1].copy())
    assert np.array_equal(read(gpu, address, size), given[::-1])
    gpu.clear(address, size // 2)
    assert not read(gpu, address, size // 2).any()
    assert np.array_equal(read(gpu, address + size // 2, size - size // 2), given[::-1][size // 2 :])


def test_memory_is_cleared_when_it_is_allocated(gpu: CudaDevice) -> None:
    assert not read(gpu, gpu.allocate(3 * MIB + 5), 3 * MIB + 5).any()


def test_threads_copy_beside_each_other(gpu: CudaDevice) -> None:
    sizes, failed = [3 * LANE + number for number in range(4)], []
    addresses = [gpu.allocate(size) for size in sizes]

    def copy(number: int) -> None:
        try:
            for seed in range(3):
                given = content(sizes[number], 10 * number + seed)
                gpu.write(addresses[number], given)
                assert np.array_equal(read(gpu, addresses[number], sizes[number]), given)
        except BaseException as error:  # noqa: BLE001 - of whatever kind, it is reported
            failed.append(error)

    threads = [threading.Thread(target=copy, args=[number]) for number in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize("size", [0, 1000, MIB, 2 * LANE + 3 * MIB + 17])
def test_files_have_the_checksums_of_the_cpu(gpu: CudaDevice, tmp_path: Path, size: int) -> None:
    cpu, given = CpuDevice(ThreadPool(2)), content(size)
    source, target = gpu.upload(given), gpu.allocate(size)
    with (tmp_path / "gpu").open("w+b", buffering=0) as file, (tmp_path / "cpu").open("w+b", buffering=0) as other:
        expected = cpu.write_part(other.fileno(), 100, cpu.upload(given), size)
        assert gpu.write_part(file.fileno(), 100, source, size) == expected
        assert gpu.read_part(file.fileno(), 100, target, size) == expected
    assert (tmp_path / "gpu").read_bytes() == (tmp_path / "cpu").read_bytes()
    assert np.array_equal(read(gpu, target, size), given)


def test_a_file_that_ends_early_disturbs_no_later_copy(gpu: CudaDevice, tmp_path: Path) -> None:
    size = 3 * LANE
    target = gpu.allocate(size)
    (tmp_path / "short").write_bytes(bytes(size - 1))
    for _ in range(2):
        with (tmp_path / "short").open("rb") as file, pytest.raises(OSError, match="Input/output error"):
            gpu.read_part(file.fileno(), 0, target, size)
    given = content(size)
    gpu.write(target, given)
    assert np.array_equal(read(gpu, target, size), given)


def test_matrices_are_packed_as_on_the_cpu(gpu: CudaDevice) -> None:
    """The larger one first, whose values must not be in the padding of the other."""
    cpu = CpuDevice(ThreadPool(2))
    buffers = [(device, device.matrix_buffer()) for device in (cpu, gpu)]
    for n, k in ((96, 1000), (40, 200)):
        values = np.random.default_rng(k).standard_normal((n, k), np.float32)
        view = MatrixView(values.view(np.uint8).reshape(-1), "f32", n, k, k, 1)
        size = -(-n // 32) * -(-k // 32) * 32 * 32 * 4
        packed = []
        for device, buffer in buffers:
            address = device.allocate_matrix(size)
            device.pack(view, PackedWeights(buffer.begin(address, size), "f32", k))
            buffer.end()
            packed.append(np.empty(size, np.uint8))
            device.read(address, packed[-1])
        assert packed[0].any()
        assert packed[0].tobytes() == packed[1].tobytes()


def test_the_memory_of_a_matrix_is_zero_whatever_was_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """More threads than this host has cores clear it, of which some come too late to take part."""
    emulated_gpu.use(monkeypatch, tmp_path)
    gpu = CudaDevice(0, ThreadPool(8, False))
    buffer, size = gpu.matrix_buffer(), 24 * MIB
    address = gpu.allocate_matrix(size)
    for _ in range(10):
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(buffer.begin(address, size)))
        assert not memory.any()
        memory.fill(0xFF)
        buffer.end()


def test_other_memory_is_refused(gpu: CudaDevice) -> None:
    given, address = np.zeros(MIB, np.uint8), gpu.allocate(MIB - 1)
    for call in (gpu.read, gpu.write):
        with pytest.raises(ValueError, match="not memory of the device"):
            call(address, given)
    for refuse in (gpu.clear, gpu.matrix_buffer().begin):
        with pytest.raises(ValueError, match="not memory of the device"):
            refuse(address, MIB)
