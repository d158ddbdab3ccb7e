"""CPUs, cores and NUMA nodes are detected, and threads are placed on them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from control_groups import cgroup
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels import _native


@pytest.fixture
def no_setting(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("QUIRE_THREADS", raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n"}),
        ("0::/a/b\n", {"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "max 100000\n"}),
        ("0::/\n", {"cpu.max": "99999 100000\n"}),
        ("0::/not/mounted/here\n", {"cpu.max": "10000 100000\n"}),
        ("0::/a\n", {"unified/a/cpu.max": "10000 100000\n"}),
        (
            "3:cpu,cpuacct:/x\n1:memory:/\n",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "70000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
        ),
        ("3:cpuacct,cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "100000", "cpu/x/cpu.cfs_period_us": "100000"}),
        ("3:cpu:/gone\n", {"cpu/cpu.cfs_quota_us": "20000", "cpu/cpu.cfs_period_us": "100000"}),
    ],
)
def test_a_cgroup_quota_limits_the_threads(
    no_setting: pytest.MonkeyPatch, tmp_path: Path, membership: str, files: dict[str, str]
) -> None:
    assert _native.default_threads(cgroup(tmp_path, membership, files)) == 1


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("", {}),
        ("0::/\n", {"cpu.max": "max 100000\n"}),
        ("0::/a\n", {"a/cpu.max": "99900000 100000\n"}),
        ("3:cpuset:/x\n", {"cpuset/x/cpu.cfs_quota_us": "1", "cpuset/x/cpu.cfs_period_us": "1"}),
        ("3:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}),
    ],
)
def test_without_a_quota_the_affinity_mask_counts(
    no_setting: pytest.MonkeyPatch, tmp_path: Path, membership: str, files: dict[str, str]
) -> None:
    assert _native.default_threads(cgroup(tmp_path, membership, files)) == len(os.sched_getaffinity(0))


def test_the_environment_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_THREADS", "7")
    assert _native.default_threads() == 7


@pytest.mark.parametrize("setting", ["", "0", "-3", "two", "2.5", "4 ", "99999999999"])
def test_a_bad_setting_is_rejected_with_its_name(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("QUIRE_THREADS", setting)
    with pytest.raises(ValueError, match=f"QUIRE_THREADS='{setting}'.*1 to 1024"):
        _native.default_threads()


# ---- cores and nodes ----------------------------------------------------------------------------


def machine(root: Path, siblings: dict[int, str], nodes: dict[int, str] | None = None) -> str:
    """Make a file system with the /sys files on CPUs and NUMA nodes; return its root."""
    cpus, node_folder = root / "sys/devices/system/cpu", root / "sys/devices/system/node"
    for cpu, text in siblings.items():
        (cpus / f"cpu{cpu}/topology").mkdir(parents=True)
        (cpus / f"cpu{cpu}/topology/thread_siblings_list").write_text(text + "\n")
    for node, text in (nodes or {}).items():
        (node_folder / f"node{node}").mkdir(parents=True)
        (node_folder / f"node{node}/cpulist").write_text(text + "\n")
        (node_folder / "online").write_text(",".join(map(str, nodes or {})) + "\n")
    return str(root)


def places(found: Sequence[_native.Place]) -> list[tuple[int, list[int]]]:
    return [(place.node, place.cpus) for place in found]


def test_hardware_threads_make_cores(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0,4", 1: "1,5", 2: "2-3", 3: "2-3", 4: "0,4", 5: "1,5"})
    assert places(_native.physical_cores(range(6), root)) == [(0, [0, 4]), (0, [1, 5]), (0, [2, 3])]
    assert places(_native.physical_cores([5, 1, 4], root)) == [(0, [4]), (0, [1, 5])]  # limited to the affinity mask


def test_cores_are_ordered_by_node(tmp_path: Path) -> None:
    siblings = {cpu: f"{cpu}" for cpu in range(4)}
    root = machine(tmp_path, siblings, {0: "0,2", 2: "1,3", 5: ""})
    assert places(_native.physical_cores(range(4), root)) == [(0, [0]), (0, [2]), (2, [1]), (2, [3])]


@pytest.mark.parametrize("text", ["", "x", "0-", "-1", "0,x"])
def test_cpus_without_topology_count_as_cores_of_one_node(tmp_path: Path, text: str) -> None:
    root = machine(tmp_path, {0: text, 1: text}, {0: text})
    assert places(_native.physical_cores([0, 1, 7], root)) == [(0, [0]), (0, [1]), (0, [7])]


def test_cores_of_this_host() -> None:
    cores = _native.physical_cores(_native.affinity_cpus())
    assert sorted(cpu for core in cores for cpu in core.cpus) == sorted(os.sched_getaffinity(0))


def test_hardware_threads_of_one_core_get_one_thread(no_setting: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    one_core = ",".join(map(str, cpus))
    assert _native.default_threads(machine(tmp_path, dict.fromkeys(cpus, one_core))) == 1


FLAT = [(0, [0]), (0, [1]), (0, [2]), (0, [3])]
SMT = [(0, [0, 4]), (0, [1, 5])]
TWO_NODES = [(0, [0, 4]), (0, [1, 5]), (3, [2, 6]), (3, [3, 7])]


@pytest.mark.parametrize(
    ("threads", "pin", "cores", "expected"),
    [
        (4, False, FLAT, [(0, []), (0, []), (0, []), (0, [])]),
        (2, True, FLAT, [(0, [0]), (0, [2])]),
        (4, True, FLAT, [(0, [0]), (0, [1]), (0, [2]), (0, [3])]),
        (2, True, SMT, [(0, [0]), (0, [1])]),
        (3, True, SMT, [(0, [0]), (0, [1]), (0, [4])]),
        (5, True, SMT, [(0, [])] * 5),
        (5, False, SMT, [(0, [])] * 5),
        (1, False, TWO_NODES, [(0, [])]),
        (2, False, TWO_NODES, [(0, [0, 4, 1, 5]), (1, [2, 6, 3, 7])]),
        (3, True, TWO_NODES, [(0, [0]), (0, [1]), (1, [2])]),
        (4, True, TWO_NODES, [(0, [0]), (0, [1]), (1, [2]), (1, [3])]),
        (9, False, TWO_NODES, [(0, [])] * 9),
        (2, True, [], [(0, []), (0, [])]),
    ],
)
def test_places(
    threads: int, pin: bool, cores: list[tuple[int, list[int]]], expected: list[tuple[int, list[int]]]
) -> None:
    found = _native.place_threads(threads, pin, [_native.Place(node, cpus) for node, cpus in cores])
    assert places(found) == expected


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 2)), min_size=1, max_size=4), st.integers(1, 60))
def test_threads_are_spread_evenly(nodes: list[tuple[int, int]], threads: int) -> None:
    """`nodes`: the number of cores of each, and of hardware threads of each core."""
    cores, cpu = [], 0
    for node, (count, width) in enumerate(nodes):
        for _ in range(count):
            cores.append(_native.Place(node, list(range(cpu, cpu + width))))
            cpu += width
    found = places(_native.place_threads(threads, True, cores))
    assert len(found) == threads
    if threads > cpu:
        assert found == [(0, [])] * threads
        return
    used = [cpus[0] for _, cpus in found]
    assert len(set(used)) == threads
    per_core = [sum(at in core.cpus for at in used) for core in cores]
    assert max(per_core) == 1 if threads <= len(cores) else min(per_core) >= 1
    node_of = {at: core.node for core in cores for at in core.cpus}
    system_nodes = [node_of[at] for at in used]
    assert system_nodes == sorted(system_nodes)
    order = sorted(set(system_nodes))
    assert [order.index(node) for node in system_nodes] == [node for node, _ in found]
