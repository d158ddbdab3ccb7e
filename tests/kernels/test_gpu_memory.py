"""KV pages on a GPU, and what else lies in its memory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import emulated_gpu
import numpy as np
import pytest
import tiny_model
from adapter_files import write_adapter

from quire.kernels import host
from quire.kernels.adapters.blocks import block_bytes
from quire.kernels.devices import Device, choice
from quire.kernels.errors import MemoryShortageError
from quire.kernels.fit import advice
from quire.kernels.kv_size import KvSize, choose_kv_size, describe_smaller_pool
from quire.kernels.operands import PlanLimits
from quire.kernels.options import LoadOptions
from quire.kernels.runner import choose_memory, describe, load_model

MIB = 1 << 20
LIMITS = PlanLimits(max_num_batched_tokens=2048, max_model_len=4096, block_size=32)
WEIGHTS = 100 * MIB


class Gpu:
    """A GPU of 1000 MiB, of which others have some."""

    in_host_memory = False
    name = "cuda:0"
    own_memory = 1000 * MIB

    def __init__(self, others: int = 0) -> None:
        self._others = others

    def available_memory(self) -> int:
        return self.own_memory - self._others


def pages(others: int = 0, adapters: int = 0, threads: int = 0, **options: Any) -> int:
    """Return the KV pages of 1 MiB that an engine has next to its weights."""
    given = LoadOptions("model", device="cuda:0", **options)
    gpu = cast("Device", Gpu(others * MIB))
    chosen = choose_kv_size(
        given, LIMITS, MIB, WEIGHTS, head_bytes=[MIB], adapter_bytes=adapters * MIB, thread_bytes=threads * MIB,
        device=gpu,
    )  # fmt: skip
    return chosen.pages


def test_pages_take_what_the_part_of_the_engine_leaves() -> None:
    assert pages() == 800
    assert pages(gpu_memory_utilization=0.5) == pages(others=450, gpu_memory_utilization=0.5) == 400
    assert pages(others=100) == 800
    assert pages(others=500) == 350  # 0.9 of what is free
    assert pages(adapters=300) == 500
    assert pages(adapters=700) == 400  # adapters have no more than pages
    assert pages(kv_share=0.5, adapters=100) == 350
    assert pages(threads=300) == 500
    assert pages(max_num_seqs=2) == 2 * 128  # no more than sequences can fill


def test_engines_on_one_gpu_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "usable_gpus", lambda: ([0], []))
    assert pages(machine_share="0/3") == pages(others=600, machine_share="2/3") == 200


def smaller(others: int, **options: Any) -> str | None:
    """Return what is said of the KV pages, 1000 of which would be useful."""
    given = LoadOptions("model", device="cuda:0", max_num_seqs=10, **options)
    limits = PlanLimits(max_num_batched_tokens=2048, max_model_len=3200, block_size=32)
    gpu, size = cast("Device", Gpu(others * MIB)), KvSize(pages(others, **options))
    return describe_smaller_pool(given, limits, size, MIB, gpu)


def test_a_pool_that_others_make_smaller_is_told_with_figures() -> None:
    """So it is after a reload from a GPU to the same one, whose engine before has its memory still."""
    assert smaller(0) is smaller(100) is None
    assert smaller(500, gpu_memory_utilization=0.4) is smaller(500, num_pages=100) is None  # as chosen
    told = smaller(500)
    assert told is not None
    assert f"{500 * MIB} of {1000 * MIB} bytes are free on device cuda:0" in told
    assert f"there are 350 KV pages of {MIB} bytes, and up to 1000 could be used" in told


def test_a_size_that_is_given_wins_and_must_be_free() -> None:
    assert pages(num_pages=900, gpu_memory_utilization=0.2) == 900
    assert pages(others=800, kv_cache_memory_bytes=100 * MIB, gpu_memory_utilization=0.5) == 100
    with pytest.raises(MemoryShortageError, match=f"^num_pages=901 is too .* {900 * MIB} are free on device cuda:0"):
        pages(num_pages=901)


def test_a_part_that_is_not_free_or_too_small_is_refused() -> None:
    with pytest.raises(MemoryShortageError) as refused:
        pages(others=333, gpu_memory_utilization=0.7)
    found = re.fullmatch(
        rf"gpu_memory_utilization=0\.7 means {700 * MIB} bytes for this engine, but {667 * MIB} are free on device "
        r"cuda:0; free some, or lower it to (\S+)",
        str(refused.value),
    )
    assert found is not None, refused.value
    assert pages(others=333, gpu_memory_utilization=float(found[1])) == 560
    with pytest.raises(MemoryShortageError, match=f"=0.05 means {50 * MIB} bytes .* buffers take {WEIGHTS}; raise it$"):
        pages(gpu_memory_utilization=0.05)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadOptions:
    """A small model on an emulated GPU with 4 of 8 GiB free."""
    emulated_gpu.use(monkeypatch, tmp_path)
    model = tiny_model.write(tmp_path / "tiny", tiny_model.weights())
    return LoadOptions(str(model), device="cuda:0", threads=1)


def test_a_smaller_pool_is_one_warning(
    tiny: LoadOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = replace(tiny, max_num_batched_tokens=64)
    assert load_model(chosen).num_pages == 2048
    assert not caplog.messages
    monkeypatch.setenv("QUIRE_EMULATED_OTHERS", str((8 << 10) - 48))
    pages = load_model(chosen).num_pages
    [told] = caplog.messages
    assert " bytes are free on device cuda:0; others may use it, as the engine before does during a reload" in told
    assert f"there are {pages} KV pages of {32 << 10} bytes, and up to 2048 could be used" in told


def test_the_plan_has_room_for_the_blocks_of_adapters(tiny: LoadOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_EMULATED_OTHERS", str((8 << 10) - 60))
    sizes = [choose_memory(describe(each)[0], each)[1].kv for each in (tiny, replace(tiny, max_loras=3))]
    assert 4 * block_bytes(1) <= sizes[0] - sizes[1] < 4 * block_bytes(1) + 6 * MIB  # and tables; huge pages are whole


def test_no_other_format_is_advised_where_the_part_is_at_fault(tiny: LoadOptions) -> None:
    assert advice(replace(tiny, gpu_memory_utilization=0.9)) is None


def test_an_adapter_needs_memory_of_the_host_too(
    tiny: LoadOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, module = np.random.default_rng(0), "base_model.model.model.layers.0.self_attn.q_proj"
    parts = {"A": rng.standard_normal((4, 64), np.float32), "B": rng.standard_normal((64, 4), np.float32)}
    adapter = write_adapter(tmp_path / "a", {f"{module}.lora_{part}.weight": x for part, x in parts.items()}, r=4)
    runner = load_model(replace(tiny, num_pages=16, max_loras=2))
    for shortage in ({"available_memory": 100}, {"resident_memory": runner.memory.high - 100}):
        with monkeypatch.context() as patch:
            for name, amount in shortage.items():
                patch.setattr(host, name, lambda amount=amount: amount)
            with pytest.raises(MemoryShortageError, match=r"take 4096 bytes of memory .*, and 100 are free"):
                runner.read_adapter(adapter)
    with monkeypatch.context() as patch:
        patch.setenv("QUIRE_EMULATED_OTHERS", str(8 << 10))
        with pytest.raises(MemoryShortageError, match="which the device does not have"):
            runner.read_adapter(adapter)
    assert runner.read_adapter(adapter)[1].num_bytes > 0
