"""KV memory is resident before a step writes to it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from quire.kernels.operands import Limits
from quire.kernels.options import LoadOptions, choose_num_pages
from quire.kernels.runner import assemble, describe

HUGE_PAGE = 2 << 20


def resident_bytes(address: int) -> int:
    """Of the mapping in which the address lies."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(bound, 16) for bound in first.split("-"))
            found = begin <= address < end
        elif found and first == "Rss:":
            return int(rest[0]) * 1024
    raise AssertionError(f"{address:#x} is not mapped")


def test_a_stripe_is_touched_ahead_of_use(demo_model: Path) -> None:
    options = LoadOptions(str(demo_model), num_pages=2048, threads=2)
    plan, _ = describe(options)
    assembly = assemble(plan, options)
    assembly.add_launches()
    native, sequences = assembly.native, assembly.native.sequences
    heads = plan.layers * plan.heads.kv
    page_bytes = plan.limits.page_size * plan.heads.token_bytes(plan.numbers) // plan.heads.kv
    stripe = HUGE_PAGE // page_bytes
    assert 2 * stripe < native.sequences.free_pages

    def is_resident(pages: int) -> bool:
        """Those pages, and hardly more."""
        deadline = time.monotonic() + 30
        while native.num_prepared_pages < pages and time.monotonic() < deadline:
            time.sleep(0.01)
        resident = resident_bytes(native.kv_layer(0))
        assert resident >= pages * page_bytes * heads
        return native.num_prepared_pages == pages and resident <= pages * page_bytes * heads + 2 * heads * HUGE_PAGE

    assert is_resident(stripe)
    slots = []
    for opened in (stripe, 2 * stripe):
        tokens = [5] * plan.limits.max_model_len
        while sequences.held_pages < opened * 2 // 5:
            slots.append(sequences.open(tokens, len(tokens)))
            assert sequences.reserve(slots[-1], len(tokens))
        native.step([slots[-1]], [0], [8])
        assert is_resident(opened + stripe)
    for slot in slots:
        sequences.close(slot)
    assert sequences.free_pages == 2048


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [(1170, 1152), (1153, 1152), (1152, 1152), (1151, 1151), (300, 300), (257, 256), (127, 127)],
)
def test_heads_end_on_huge_pages_where_that_loses_little(asked: int, chosen: int) -> None:
    heads, page_bytes = 4, 16384  # of a head: 128 pages on a huge page
    options = LoadOptions("model", kv_bytes=asked * heads * page_bytes)
    limits = Limits(2048, 4096, 32)
    assert choose_num_pages(options, limits, heads * page_bytes, 0, parts=heads) == chosen
    exact = LoadOptions("model", num_pages=asked)
    assert choose_num_pages(exact, limits, heads * page_bytes, 0, parts=heads) == asked
