"""XXH64, and the checked reading and writing of files, against the specification written a second time."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels._native import Runner, RunnerConfig, xxh64

P1, P2, P3, P4, P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
MASK = (1 << 64) - 1
MIB = 1 << 20


def rotate(value: int, bits: int) -> int:
    value &= MASK
    return (value << bits | value >> (64 - bits)) & MASK


def mix(accumulator: int, lane: int) -> int:
    return rotate(accumulator + lane * P2, 31) * P1 & MASK


def expected_xxh64(data: bytes, seed: int) -> int:
    """XXH64 as https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md says, step by step."""
    rest = data
    if len(data) < 32:
        hash_ = seed + P5
    else:
        lanes = [seed + P1 + P2, seed + P2, seed, seed - P1]
        while len(rest) >= 32:
            lanes = [mix(lane, int.from_bytes(rest[8 * i : 8 * i + 8], "little")) for i, lane in enumerate(lanes)]
            rest = rest[32:]
        hash_ = sum(rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            hash_ = (hash_ ^ mix(0, lane)) * P1 + P4 & MASK
    hash_ = hash_ + len(data) & MASK
    while len(rest) >= 8:
        hash_ = rotate(hash_ ^ mix(0, int.from_bytes(rest[:8], "little")), 27) * P1 + P4 & MASK
        rest = rest[8:]
    if len(rest) >= 4:
        hash_ = rotate(hash_ ^ int.from_bytes(rest[:4], "little") * P1 & MASK, 23) * P2 + P3 & MASK
        rest = rest[4:]
    for byte in rest:
        hash_ = rotate(hash_ ^ byte * P5 & MASK, 11) * P1 & MASK
    hash_ = (hash_ ^ hash_ >> 33) * P2 & MASK
    hash_ = (hash_ ^ hash_ >> 29) * P3 & MASK
    return hash_ ^ hash_ >> 32


def hash_of(data: bytes, seed: int = 0) -> int:
    return xxh64(np.frombuffer(data, np.uint8), seed)


@pytest.mark.parametrize(
    ("data", "seed", "expected"),
    [
        (b"", 0, 0xEF46DB3751D8E999),
        (b"a", 0, 0xD24EC4F1A98C6E5B),
        (b"abc", 0, 0x44BC2CF5AD770999),
        (b"xxhash", 20141025, 0xB559B98D844E0635),
        (b"Nobody inspects the spammish repetition", 0, 0xFBCEA83C8A378BF1),
    ],
)
def test_published_vectors(data: bytes, seed: int, expected: int) -> None:
    assert hash_of(data, seed) == expected_xxh64(data, seed) == expected


@given(st.binary(max_size=200), st.integers(0, MASK))
def test_every_length_and_seed(data: bytes, seed: int) -> None:
    assert hash_of(data, seed) == expected_xxh64(data, seed)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(
        RunnerConfig(
            threads=2, num_pages=1, block_size=32, vocab_size=1, kv_heads=1, max_num_batched_tokens=1, max_logit_rows=1,
            logit_stride=32, hidden_size=32, tokens_per_entry=1, layers=1, tile_bytes=64, value_offset=32,
        )
    )  # fmt: skip


@pytest.mark.parametrize("size", [0, 1, 1000, MIB, 3 * MIB + 17])
def test_a_part_of_a_file_is_written_and_read_with_its_checksum(runner: Runner, tmp_path: Path, size: int) -> None:
    content = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    blocks = [hash_of(content[at : at + MIB].tobytes()) for at in range(0, size, MIB)]
    expected = hash_of(np.array(blocks, np.uint64).tobytes())
    source, target = runner.upload(content), runner.allocate(size)
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        assert runner.write_part(file.fileno(), 100, source, size) == expected
        assert runner.read_part(file.fileno(), 100, target, size) == expected
    assert (tmp_path / "file").read_bytes()[100:] == content.tobytes()
    assert ctypes.string_at(target, size) == content.tobytes()


def test_errors_of_the_system_are_raised(runner: Runner, tmp_path: Path) -> None:
    target = runner.allocate(100)
    (tmp_path / "short").write_bytes(bytes(99))
    with (tmp_path / "short").open("rb") as file:
        with pytest.raises(OSError, match="Input/output error"):
            runner.read_part(file.fileno(), 0, target, 100)
        with pytest.raises(OSError, match="Bad file descriptor"):
            runner.write_part(file.fileno(), 0, target, 100)
    with pytest.raises(ValueError, match="not memory that was allocated here"):
        runner.read_part(0, 0, 4096, 100)
