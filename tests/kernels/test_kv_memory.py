"""KV memory is resident before a step writes to it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from patience import PATIENCE

from quire.kernels._native import HUGE_PAGE
from quire.kernels.kv_size import choose_kv_size
from quire.kernels.operands import PlanLimits
from quire.kernels.options import LoadOptions
from quire.kernels.runner import assemble, describe


def resident_bytes(address: int) -> int:
    """Return the resident bytes of the mapping that contains the address."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(bound, 16) for bound in first.split("-"))
            found = begin <= address < end
        elif found and first == "Rss:":
            return int(rest[0]) * 1024
    raise AssertionError(f"{address:#x} is not mapped")


def test_an_extent_is_prefaulted_ahead_of_use(demo_model: Path) -> None:
    options = LoadOptions(str(demo_model), num_pages=2048, threads=2)
    plan, _ = describe(options)
    assembly = assemble(plan, options)
    assembly.open_kv()
    native, sequences = assembly.native, assembly.native.sequences
    heads, (page_bytes,) = sum(layer.kv for layer in plan.kv_layers), plan.page_head_bytes
    extent = HUGE_PAGE // page_bytes
    assert 2 * extent < native.sequences.free_pages

    def is_resident(pages: int) -> bool:
        """Return True once these pages are resident, and hardly more."""
        deadline = time.monotonic() + PATIENCE
        while native.num_prefaulted_pages < pages and time.monotonic() < deadline:
            time.sleep(0.01)
        resident = resident_bytes(native.kv_layer(0))
        assert resident >= pages * page_bytes * heads
        return native.num_prefaulted_pages == pages and resident <= pages * page_bytes * heads + 2 * heads * HUGE_PAGE

    assert is_resident(extent)
    slots = []
    for share in range(1, 10):  # eighths of an extent: an extent is committed every four, and ready after two
        tokens = [5] * plan.limits.max_model_len
        while sequences.held_pages < share * extent // 8:
            slots.append(sequences.open(tokens, len(tokens)))
            assert sequences.reserve(slots[-1], len(tokens) // 2)
        assert sequences.held_pages == share * extent // 8
        native.step([slots[-1]], [0], [8])
        committed = (share + 3) // 4 * extent
        assert is_resident(committed + extent * min(2, (share - 1) % 4 + 1) // 2)
    for slot in slots:
        sequences.close(slot)
    assert sequences.free_pages == 2048


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [(1170, 1152), (1153, 1152), (1152, 1152), (1151, 1151), (300, 300), (257, 256), (127, 127)],
)
def test_heads_end_on_huge_pages_where_that_loses_little(asked: int, chosen: int) -> None:
    heads, page_bytes = 4, 16384  # of one head: 128 pages fill a huge page
    options = LoadOptions("model", kv_cache_memory_bytes=asked * heads * page_bytes)
    limits = PlanLimits(2048, 2048, 32)
    assert choose_kv_size(options, limits, heads * page_bytes, 0, head_bytes=[page_bytes]).pages == chosen
    exact = LoadOptions("model", num_pages=asked)
    assert choose_kv_size(exact, limits, heads * page_bytes, 0, head_bytes=[page_bytes]).pages == asked


@pytest.mark.parametrize(
    ("max_model_len", "page_bytes", "num_pages"),
    [(4096, 16384, 128), (4128, 16384, 129), (4096, 8448, 2269), (4096, 12288, 1536), (4096, 12288, 1540)],
)
def test_heads_need_not_end_on_huge_pages(max_model_len: int, page_bytes: int, num_pages: int) -> None:
    """One context must fit, or only few numbers of pages would end on huge pages."""
    options, heads = LoadOptions("model", kv_cache_memory_bytes=num_pages * 4 * page_bytes), 4
    chosen = choose_kv_size(
        options, PlanLimits(2048, max_model_len, 32), heads * page_bytes, 0, head_bytes=[page_bytes]
    ).pages
    assert chosen == {1540: 1536}.get(num_pages, num_pages)


def test_by_default_nearly_all_sequences_fit_at_their_longest() -> None:
    options = LoadOptions("model", max_num_seqs=41)
    assert choose_kv_size(options, PlanLimits(2048, 4000, 32), 4 * 16384, 0, head_bytes=[16384]).pages == 41 * 125 - 5


@pytest.mark.parametrize(("whole", "chosen"), [(False, 16 * 256), (True, 4 * (64 + 16))])
def test_an_encoder_gets_pages_for_a_few_steps(whole: bool, chosen: int) -> None:
    """A decoder gets pages for 16 sequences of 256 pages; a step of 2048 tokens fills 64 pages, and 16 in part."""
    options = LoadOptions("model", max_num_seqs=16)
    assert choose_kv_size(options, PlanLimits(2048, 8192, 32), 4096, 0, head_bytes=[4096], whole=whole).pages == chosen
