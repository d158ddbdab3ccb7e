"""The memory of the tier below a GPU's KV pages, within that of the host and of the process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest

from quire.engine_core.memory import MemoryGuard
from quire.kernels import host
from quire.kernels.devices import Device
from quire.kernels.errors import MemoryShortageError, ModelError
from quire.kernels.host_tier import has_host_tier, open_host_tier
from quire.kernels.memory import MemoryPlan
from quire.kernels.options import LoadOptions

MIB = 1 << 20
FREE = 8192 * MIB
PROGRAM = 300 * MIB
POOL = 256 * MIB


@dataclass
class Place:
    """A device, by where its memory is."""

    in_host_memory: bool
    name: str = "gpu"


GPU, CPU = (cast("Device", Place(in_host_memory=is_host)) for is_host in (False, True))


@pytest.fixture(autouse=True)
def fd(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Give the host so much memory, and a supervisor a file."""
    monkeypatch.setattr(host, "available_memory", lambda: FREE)
    fd = os.memfd_create("kv")
    yield fd
    os.close(fd)


def size(fd: int, pool: int = POOL, **options: Any) -> int:
    given: dict[str, Any] = {"kv_host_memory": None, **options}
    tier = open_host_tier(LoadOptions("model", kv_memory_fd=fd, **given), pool, PROGRAM)
    assert tier.fd == fd
    return tier.bytes


def test_a_tier_is_below_a_gpu_by_default_and_never_below_a_cpu() -> None:
    default, none, some = (LoadOptions("model", kv_host_memory=given) for given in (None, 0, MIB))
    assert [has_host_tier(each, GPU, whole=False) for each in (default, none, some)] == [True, False, True]
    assert [has_host_tier(each, CPU, whole=False) for each in (default, none)] == [False, False]
    assert not has_host_tier(default, GPU, whole=True)
    with pytest.raises(ModelError, match=f"kv_host_memory={MIB} keeps KV pages of a GPU .* device gpu .*; leave it"):
        has_host_tier(some, CPU, whole=False)


def test_the_default_is_a_part_of_what_is_free_and_of_use(fd: int) -> None:
    assert size(fd) == 4 * POOL
    assert size(fd, pool=FREE) == FREE // 4
    assert size(fd, pool=FREE, machine_share="0/4") == FREE // 16
    os.pwrite(fd, bytes(64 * MIB), 0)  # as the engine before has left it
    assert size(fd, pool=FREE) == (FREE + 64 * MIB) // 4


def test_engines_that_share_a_host_start_again_with_what_they_had(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the others is not free any more, and that of this one is its own."""
    half: dict[str, Any] = {"pool": FREE, "machine_share": "0/2"}
    default = size(fd, **half)
    for given in (None, FREE // 16 * 6):
        mine = default if given is None else given
        os.ftruncate(fd, 0)
        os.posix_fallocate(fd, 0, mine)
        monkeypatch.setattr(host, "available_memory", lambda taken=2 * mine: FREE - taken)
        assert size(fd, kv_host_memory=given, **half) == mine


def test_auto_goes_on_where_there_is_no_gpu(caplog: pytest.LogCaptureFixture) -> None:
    assert not has_host_tier(LoadOptions("model", kv_host_memory=MIB, device="auto"), CPU, whole=False)
    assert f"kv_host_memory={MIB} has no effect: there is no GPU" in caplog.text


def test_the_default_is_within_a_memory_limit(fd: int) -> None:
    assert size(fd, memory_limit=1024 * MIB) == 1024 * MIB - PROGRAM - 128 * MIB
    assert size(fd, memory_limit=PROGRAM + 64 * MIB) == 0


def test_a_chosen_size_is_kept_or_refused(fd: int) -> None:
    assert size(fd, kv_host_memory=FREE) == FREE
    with pytest.raises(MemoryShortageError, match=f"kv_host_memory={FREE + 1} is too much: {FREE} bytes .*; lower it"):
        size(fd, kv_host_memory=FREE + 1)
    limit, most = 1024 * MIB, (1024 - 128) * MIB - PROGRAM
    assert size(fd, kv_host_memory=most, memory_limit=limit) == most
    with pytest.raises(MemoryShortageError, match=f"memory_limit={limit} leaves {most} bytes .*; raise it, or lower"):
        size(fd, kv_host_memory=most + 1, memory_limit=limit)


def test_without_a_file_there_is_one_of_the_process() -> None:
    tier = open_host_tier(LoadOptions("model", kv_host_memory=MIB), POOL, PROGRAM)
    assert (tier.bytes, os.get_inheritable(tier.fd)) == (MIB, False)
    os.close(tier.fd)
    with pytest.raises(ModelError, match=f"kv_memory_fd={tier.fd}: Bad file descriptor; give a memfd"):
        size(tier.fd)


def test_the_plan_counts_the_tier_but_not_as_resident() -> None:
    plan = MemoryPlan(weights=MIB, buffers=MIB, kv=POOL, reserve=80 * MIB, on_device=True, program=PROGRAM)
    free = plan.with_host_tier(4 * POOL, None)
    assert free.limit == plan.limit + 4 * POOL
    assert (free.resident_limit, free.high) == (plan.resident_limit, plan.high)
    limited = plan.with_host_tier(16 * MIB, plan.limit)
    assert limited.limit == plan.limit
    assert limited.reserve == 64 * MIB
    assert limited.high == plan.limit - 16 * MIB - 8 * MIB
    assert f"KV pages in host memory {16 * MIB}" in limited.describe()


def test_requests_do_not_get_the_memory_of_the_tier() -> None:
    plan = MemoryPlan(weights=MIB, buffers=MIB, kv=POOL, reserve=80 * MIB, on_device=True, program=PROGRAM)
    plan = plan.with_host_tier(4 * POOL, None)
    resident = PROGRAM + 80 * MIB
    guard = MemoryGuard(plan, read=lambda: resident, trim=lambda: None)
    guard.check(1.0, lambda: None, is_idle=False)
    assert guard.is_full
    assert guard.stats()["memory_limit"] == plan.limit
    resident -= 20 * MIB
    guard.check(2.0, lambda: None, is_idle=False)
    assert not guard.is_full
