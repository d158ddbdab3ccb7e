"""The application: its deployments, and what Ray Serve is to know of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application

from quire.frontend.ray.ingress import HttpIngress
from quire.frontend.ray.options import ApplicationOptions, RayOptions
from quire.frontend.ray.replica import EngineReplica
from quire.frontend.ray.router import STATS_SECONDS, PrefixRouter
from quire.frontend.ray.scaling import TokenPolicy

_OPEN_REQUESTS = 1 << 14  # of a replica: engines and servers have limits of their own, with errors that say what to do
_HEALTH_SECONDS = 5.0


def build(args: Mapping[str, Any]) -> Application:
    """Return the application with the options of `quire serve`, with underscores, and those of `RayOptions`.

    Raises `ValueError` for the first that is not allowed.
    """
    options = ApplicationOptions.parse(args)
    drain = options.server_args.shutdown_timeout
    common = {
        "max_ongoing_requests": _OPEN_REQUESTS,
        "graceful_shutdown_timeout_s": drain,
        "health_check_period_s": _HEALTH_SECONDS,
    }
    engines = serve.deployment(
        EngineReplica,
        name="engines",
        ray_actor_options={"num_cpus": options.ray.replica_cpus},
        max_replicas_per_node=options.ray.replicas_per_node,
        request_router_config={
            "request_router_class": _path_of(PrefixRouter),
            "request_router_kwargs": {"block_size": options.engine.get("block_size", 32)},
            "request_routing_stats_period_s": STATS_SECONDS,
        },
        **_number(options.ray),
        **common,
    )
    ingress = serve.deployment(serve.ingress()(HttpIngress), name="http", ray_actor_options={"num_cpus": 0}, **common)
    bound: Application = ingress.bind(engines.bind(dict(options.engine), options.ray.replicas_per_node), dict(args))
    return bound


def _number(options: RayOptions) -> dict[str, Any]:
    """Return how many replicas there are: a number, or bounds with the policy that chooses it."""
    if options.max_replicas in (None, options.min_replicas):
        return {"num_replicas": options.min_replicas}
    policy = {"policy_function": _path_of(TokenPolicy), "policy_kwargs": {"target_tokens": options.target_tokens}}
    bounds = {"min_replicas": options.min_replicas, "max_replicas": options.max_replicas, "policy": policy}
    return {"autoscaling_config": bounds}


def _path_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__name__}"


app = build({})
