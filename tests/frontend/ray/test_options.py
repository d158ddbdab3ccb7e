"""The arguments of the application, the parts of a node's CPUs, and the number of replicas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.frontend.ray.cpus import part_of
from quire.frontend.ray.options import ApplicationOptions
from quire.frontend.ray.scaling import TokenPolicy


def test_options_go_to_those_whom_they_concern() -> None:
    options = ApplicationOptions.parse(
        {"threads": 2, "seed": 3, "max_replicas": 4, "served_model_name": ["a", "b"], "start_timeout": 9.0}
    )
    assert options.engine == {"preload_grammars": True, "threads": 2, "start_timeout": 9.0}
    assert options.client == {"seed": 3}
    assert options.ray.max_replicas == 4
    assert options.server_args.served_model_name == ("a", "b")


def test_options_may_be_texts() -> None:
    given = {"threads": "2", "preload_grammars": "false", "api_key": "a,b", "target_itl": "5.5", "memory_limit": "4GiB"}
    options = ApplicationOptions.parse({**given, "replica_cpus": "0.5"})
    assert options.engine == {"threads": 2, "preload_grammars": False, "target_itl": 5.5, "memory_limit": "4GiB"}
    assert options.server_args.api_key == ("a", "b")
    assert options.ray.replica_cpus == 0.5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"thread": 2}, "thread=2 is not an option"),
        ({"port": 80}, "port=80 has no effect under Ray Serve: Ray Serve's proxy"),
        ({"engine_address": "ipc://x"}, "engine_address='ipc://x' has no effect"),
        ({"threads": "two"}, "threads='two'"),
        ({"preload_grammars": "maybe"}, "preload_grammars='maybe'"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas=2 is less than min_replicas=3"),
        ({"kv_disk_bytes": "1GiB"}, "kv_disk_bytes is given without kv_disk"),
        ({"root_path": "/x"}, "route_prefix"),
    ],
)
def test_a_bad_option_is_rejected_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("/", ".")):
        ApplicationOptions.parse(given)


def test_parts_of_a_node_are_whole_numa_nodes() -> None:
    """Linux often numbers the CPUs of two sockets in turn."""
    sockets = {cpu: cpu % 2 for cpu in range(8)}
    assert part_of(range(8), sockets, 0, 2) == {0, 2, 4, 6}
    assert part_of(range(8), sockets, 3, 2) == {1, 3, 5, 7}
    assert sorted(cpu for index in range(3) for cpu in part_of(range(8), {}, index, 3)) == list(range(8))
    assert part_of([5], {}, 0, 2) == {5}


@pytest.mark.parametrize(
    ("tokens", "expected"), [({}, 0), ({"a": 100}, 1), ({"a": 100, "b": 901}, 2), ({"a": 3000}, 3)]
)
def test_there_is_a_replica_for_so_many_tokens(tokens: dict[str, float], expected: int) -> None:
    context = SimpleNamespace(aggregated_metrics={"tokens": tokens})
    assert TokenPolicy(target_tokens=1000)(cast("Any", context)) == (expected, {})
