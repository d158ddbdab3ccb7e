"""The checksum, and the checked reading and writing of files, against the library of XXH3's author."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels._native import CpuDevice, ThreadPool, checksum

MIB = 1 << 20


def hash_of(data: bytes) -> int:
    return checksum(np.frombuffer(data, np.uint8))


@pytest.mark.parametrize(
    ("data", "expected"), [(b"", 0x2D06800538D394C2), (b"a", 0xE6C632B61E964E1F), (b"abc", 0x78AF5F94892F3950)]
)
def test_published_vectors(data: bytes, expected: int) -> None:
    assert hash_of(data) == expected


@given(st.binary(max_size=600), st.integers(1, 40))
def test_every_length(data: bytes, times: int) -> None:
    assert hash_of(data * times) == xxhash.xxh3_64_intdigest(data * times)


@pytest.fixture(scope="module")
def device() -> CpuDevice:
    return CpuDevice(ThreadPool(2))


@pytest.mark.parametrize("size", [0, 1, 1000, MIB, 3 * MIB + 17])
def test_a_part_of_a_file_is_written_and_read_with_its_checksum(device: CpuDevice, tmp_path: Path, size: int) -> None:
    content = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    blocks = [hash_of(content[at : at + MIB].tobytes()) for at in range(0, size, MIB)]
    expected = hash_of(np.array(blocks, np.uint64).tobytes())
    source, target = device.upload(content), device.allocate(size)
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        assert device.write_part(file.fileno(), 100, source, size) == expected
        assert device.read_part(file.fileno(), 100, target, size) == expected
    assert (tmp_path / "file").read_bytes()[100:] == content.tobytes()
    assert ctypes.string_at(target, size) == content.tobytes()


def test_errors_of_the_system_are_raised(device: CpuDevice, tmp_path: Path) -> None:
    target = device.allocate(100)
    (tmp_path / "short").write_bytes(bytes(99))
    with (tmp_path / "short").open("rb") as file:
        with pytest.raises(OSError, match="Input/output error"):
            device.read_part(file.fileno(), 0, target, 100)
        with pytest.raises(OSError, match="Bad file descriptor"):
            device.write_part(file.fileno(), 0, target, 100)
    with pytest.raises(ValueError, match="not memory that was allocated here"):
        device.read_part(0, 0, 4096, 100)
