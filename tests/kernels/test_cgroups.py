"""Memory that control groups of both versions leave is found, in file systems that hold nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from control_groups import cgroup

from quire.kernels.cgroups import memory_left

STAT = "cache 99\ninactive_file 30\nactive_file 10\nshmem 5\n"
STAT_V1 = "inactive_file 1\nactive_file 1\ntotal_inactive_file 30\ntotal_active_file 10\n"
NO_LIMIT_V1 = "9223372036854771712\n"


def group(path: str, limit: str, used: int) -> dict[str, str]:
    return {f"{path}memory.max": f"{limit}\n", f"{path}memory.current": f"{used}\n", f"{path}memory.stat": STAT}


def group_v1(path: str, limit: str, used: int) -> dict[str, str]:
    names = ("limit_in_bytes", "usage_in_bytes", "stat")
    values = (limit, f"{used}\n", STAT_V1)
    return {f"memory/{path}memory.{name}": value for name, value in zip(names, values, strict=True)}


@pytest.mark.parametrize(
    ("membership", "files", "left"),
    [
        ("", {}, []),
        ("0::/a/b\n", group("a/b/", "1000", 300), [740]),
        ("0::/a/b\n", group("a/b/", "max", 300) | group("a/", "500", 400), [140]),
        ("0::/a\n", group("a/", "100", 400), [0]),
        ("0::/not/mounted/here\n", group("", "1000", 300), [740]),
        ("0::/a\n", {"a/memory.max": "1000\n"}, []),
        ("0::/a\n", {f"unified/{name}": text for name, text in group("a/", "1000", 300).items()}, [740]),
        ("4:memory:/a/b\n", group_v1("a/b/", "1000\n", 300) | group_v1("a/", NO_LIMIT_V1, 900), [740]),
        ("4:memory,hugetlb:/a\n", group_v1("a/", "1000\n", 300) | group_v1("", "2000\n", 900), [740, 1140]),
        ("4:memory:/of/the/host\n", group_v1("", "1000\n", 300), [740]),
        ("4:cpu:/a\n", group_v1("a/", "1000\n", 300), []),
    ],
)
def test_memory_left(tmp_path: Path, membership: str, files: dict[str, str], left: list[int]) -> None:
    assert memory_left(Path(cgroup(tmp_path, membership, files))) == left
