"""Benchmark of the prefix cache: every operation is timed, in trees of the requested sizes and shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.cache_operations import FullCache
from bench.cache_shapes import SHAPES

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_cache.py"


def bench(*arguments: str) -> str:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_every_operation_is_timed_in_trees_of_each_size(tmp_path: Path) -> None:
    output = tmp_path / "cache.json"
    small = ["--nodes", "1000", "2000", "--repetitions", "20", "--clients", "16", "--num-pages", "500", "--steps", "50"]
    text = bench(*small, "--json", str(output))
    found = json.loads(output.read_text())
    assert found["operations"].keys() == found["ratios"].keys() == SHAPES.keys()
    for shape, sizes in found["operations"].items():
        assert shape in text
        assert sizes.keys() == {"1000", "2000"}
        for figures in sizes.values():
            assert figures.keys() == {"match", "evict", "insert", "release", "step"}
            assert all(0 < of["p50"] <= of["p99"] <= of["max"] for of in figures.values())
    pauses = found["pauses"]
    assert pauses["steps"] == 50
    assert pauses["evictions"] > 0
    assert pauses["collections"] == 0


def test_random_operations() -> None:
    assert "500 random operations with seed 7" in bench("--check", "500", "--seed", "7")


@pytest.mark.parametrize("shape", SHAPES)
def test_the_tree_has_the_requested_size_and_shape(shape: str) -> None:
    cache = FullCache(shape, 1000, block_size=8, seed=1)
    cache.measure(50)
    assert abs(cache.sequences.tree.size - 1000) < 50
    assert cache.sequences.held_pages == 0
    parents = [parent for parent in cache.shape.parents if parent >= 0]
    branches = [parents.count(parent) for parent in set(parents)]
    assert max(branches) >= 3
    for end in cache.shape.ends[-5:]:
        tokens = cache.shape.tokens(end)
        slot = cache.sequences.open([*tokens, 0], len(tokens) + 1, cache_salt="")
        assert cache.sequences.match(slot)[0] == len(tokens)
        cache.sequences.close(slot)
