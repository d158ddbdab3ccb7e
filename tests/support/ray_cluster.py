"""A Ray cluster of several nodes on this machine, with the application of `quire.frontend.ray`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import msgspec
import ray
from parsed_metrics import ParsedMetrics
from patience import PATIENCE
from ray import serve
from ray._private import state
from ray.cluster_utils import Cluster
from ray.serve.config import HTTPOptions

T = TypeVar("T")

NUM_PAGES = 256
"""KV pages of each engine."""

_METRICS_PERIOD = "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"
_PAUSE = 0.05  # seconds between two looks


def wait_for(look: Callable[[], T | None]) -> T:
    """Return what `look` finds, once it finds something."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(_PAUSE)
    return found


class RayCluster:
    """A head with the proxy and the ingress, and nodes of one CPU for the engines."""

    def __init__(self, num_nodes: int, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        # Who is killed leaves its files. Ray's paths are long, and those of sockets may have 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="quire-ray-", dir="/tmp"))
        self._environment = patch.dict(os.environ, {"TMPDIR": str(self._folder), _METRICS_PERIOD: "0.5"})
        self._environment.start()
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "resources": {"ingress": 1}, "include_dashboard": False},
        )
        self.nodes = [self.cluster.add_node(num_cpus=1) for _ in range(num_nodes)]
        ray.init(self.cluster.address, log_to_driver=False, logging_level="error")
        serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host="127.0.0.1", port=port))

    def deploy(self, folder: Path, engines: dict[str, Any]) -> None:
        """Deploy the application by a config file, or change it; `engines`: options of their deployment."""
        application = {
            "name": "quire",
            "route_prefix": "/",
            "import_path": "quire.frontend.ray:build",
            "args": {"threads": 1, "num_pages": NUM_PAGES},
            "deployments": [
                {"name": "http", "ray_actor_options": {"num_cpus": 0, "resources": {"ingress": 0.001}}},
                {"name": "engines", **engines},
            ],
        }
        options = {"host": "127.0.0.1", "port": self._port}
        config = {"proxy_location": "HeadOnly", "http_options": options, "applications": [application]}
        file = folder / "serve.yaml"
        file.write_bytes(msgspec.yaml.encode(config))
        command = [
            sys.executable,
            "-m",
            "ray.serve.scripts",
            "run",
            "--non-blocking",
            "--app-dir",
            str(folder),
            str(file),
        ]
        environment = {**os.environ, "RAY_ADDRESS": self.cluster.address}
        subprocess.run(command, check=True, env=environment, timeout=PATIENCE, stdout=subprocess.DEVNULL)
        wait_for(lambda: serve.status().applications["quire"].status == "RUNNING")

    def wait_replicas(self, count: int) -> None:
        """Wait until there are so many replicas with an engine."""
        wait_for(lambda: len(self.replicas()) == len(self.engine_pids()) == count)

    def metrics(self) -> ParsedMetrics:
        """Return the metrics of the application."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE) as reply:
            return ParsedMetrics(reply.read())

    def check_pages(self) -> None:
        """Wait until all engines are idle, and check that their KV pages are accounted for."""

        def are_idle() -> bool:
            found = self.metrics()
            if "quire:kv_pages" not in found.families:
                return False  # none has answered in time
            counts = [found[f"quire:kv_pages_{name}"] for name in ("free", "cached", "held")]
            assert sum(counts) == found["quire:kv_pages"]
            assert found["quire:kv_pages"] % NUM_PAGES == 0
            return not counts[-1] and not found["quire:num_requests_running"] + found["quire:num_requests_waiting"]

        wait_for(are_idle)

    def replicas(self, deployment: str = "engines") -> list[dict[str, Any]]:
        """Return the actors of a deployment that are alive, as Ray describes them."""
        name = f"#{deployment}#"
        return [actor for actor in state.actors().values() if actor["State"] == "ALIVE" and name in actor["Name"]]

    def wait_told(self) -> None:
        """Wait until Ray's controller has told routers what the engines have cached now."""
        handle = serve.get_deployment_handle("engines", app_name="quire")

        def are_told() -> bool:
            have = handle.broadcast("record_routing_stats").results(timeout_s=PATIENCE)
            replicas = handle._router._asyncio_router.request_router.curr_replicas.values()
            return sorted(map(repr, have)) == sorted(repr(replica.routing_stats) for replica in replicas)

        wait_for(are_told)

    def renew_ingress(self) -> None:
        """Kill the ingress, and wait until another one serves."""
        (old,) = self.replicas("http")
        kill(old["Pid"])
        wait_for(lambda: [each for each in self.replicas("http") if each["Pid"] != old["Pid"]])
        wait_for(self._has_metrics)

    def _has_metrics(self) -> bool:
        with suppress(OSError):
            return "quire:kv_pages" in self.metrics().families
        return False

    def engine_pids(self) -> list[int]:
        """Return the process ids of the engines that serve, one of each replica."""
        return [pid for replica in self.replicas() if (pid := _engine_of(replica["Pid"])) is not None]

    def node_of(self, replica: dict[str, Any]) -> Any:
        """Return the node of a replica."""
        return next(node for node in self.nodes if node.node_id == replica["Address"]["NodeID"])

    def kill_node(self, replica: dict[str, Any]) -> None:
        """Kill the node of a replica, without a word to anyone."""
        node = self.node_of(replica)
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def add_node(self) -> None:
        """Add a node."""
        self.nodes.append(self.cluster.add_node(num_cpus=1))

    def close(self) -> None:
        """End everything."""
        serve.shutdown()
        ray.shutdown()
        self.cluster.shutdown()
        self._environment.stop()
        shutil.rmtree(self._folder)


def kill(pid: int) -> None:
    """Kill a process."""
    os.kill(pid, signal.SIGKILL)


def _engine_of(pid: int) -> int | None:
    """Return the oldest engine process that a process has started; a later one stands by."""
    children: list[int] = []
    with suppress(FileNotFoundError):  # it ends
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    return next((child for child in sorted(children) if _is_engine(child)), None)


def _is_engine(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return b"quire.engine_core" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
