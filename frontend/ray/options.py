"""The arguments of the application: the options of `quire serve`, and a few of Ray Serve's deployments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from quire.frontend.engine_args import EngineArgs
from quire.frontend.http.args import ServerArgs
from quire.protocol.engine_options import COUNT, ClientOptions
from quire.protocol.options import Option, Range, check_options, options_of

_SWITCHES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_PROXY, _ENGINES = "Ray Serve's proxy owns the connections of clients", "Ray Serve places and connects the engines"
_REFUSED = {
    **dict.fromkeys(
        (
            *("host", "port", "uds", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "max_connections"),
            *("header_timeout", "send_timeout", "keep_alive"),
        ),
        f"{_PROXY}; set it there, in http_options of the Serve config",
    ),
    "root_path": "give the application a route_prefix instead",
    **dict.fromkeys(
        (
            *("engine_address", "engine", "router", "data_parallel_size", "admin_key_file", "reconnect_timeout"),
            *("fetch_prefixes", "curve_keys", "insecure_tcp"),
        ),
        f"{_ENGINES}; leave it out",
    ),
    **dict.fromkeys(
        ("models_dir", "max_loaded", "idle_timeout"), "an application has one model, which stays loaded; leave it out"
    ),
    **dict.fromkeys(
        ("prefill_address", "prefill_min_tokens", "kv_peer"),
        "no replica of the engine has a peer of its own; leave it out",
    ),
    **dict.fromkeys(
        ("response_store", "response_store_entries", "response_store_size", "response_store_days"),
        "each ingress would have a store of its own; leave it out",
    ),
    "skip_tokenizer_init": "the ingress serves texts; leave it out",
}


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Options of the deployments. Raises `ValueError` for a bad value.

    Ray Serve:
        min_replicas: Replicas of the engine at least.
        max_replicas: Replicas of the engine at most; Ray adds and removes some by the load. Default: min_replicas.
        target_tokens: Tokens of open requests, prompts and answers, for which there is to be one replica.
        replicas_per_node: Replicas of the engine on one node at most; each takes an equal part of its CPUs, by NUMA
            nodes, so that it may be one a socket.
        replica_cpus: CPUs that Ray reserves for a replica of the engine.
    """

    min_replicas: Annotated[int, Option("N", COUNT)] = 1
    max_replicas: Annotated[int | None, Option("N", COUNT)] = None
    target_tokens: Annotated[int, Option("TOKENS", COUNT)] = 16384
    replicas_per_node: Annotated[int, Option("N", Range(1, 64))] = 1
    replica_cpus: Annotated[float, Option("N", Range(0, 4096))] = 1.0

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas={self.max_replicas} is less than min_replicas={self.min_replicas}; raise it, or lower "
                "min_replicas"
            )


@dataclass(frozen=True)
class ApplicationOptions:
    """All arguments of the application, by whom they concern: engines, the clients of engines, the HTTP server."""

    ray: RayOptions = field(default_factory=RayOptions)
    engine: Mapping[str, Any] = field(default_factory=dict)
    client: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)

    @property
    def server_args(self) -> ServerArgs:
        """The arguments of the HTTP server, which is reached under any name, through Ray Serve's proxy."""
        return ServerArgs(**{**self.server, "host": "0.0.0.0"})  # noqa: S104 - it listens nowhere

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> ApplicationOptions:
        """Return the arguments as a config file gives them, or as texts from `serve run BUILDER NAME=VALUE`.

        Raises `ValueError` for the first that is unknown, has no effect here, or has a value that is not allowed.
        """
        tables = {"ray": RayOptions, "client": ClientOptions, "server": ServerArgs, "engine": EngineArgs}
        values: dict[str, dict[str, Any]] = {part: {} for part in tables}
        for name, value in given.items():
            if (reason := _REFUSED.get(name)) is not None:
                raise ValueError(f"{name}={value!r} has no effect under Ray Serve: {reason}")
            part = next((part for part, table in tables.items() if name in options_of(table)), None)
            if part is None:
                raise ValueError(
                    f"{name}={value!r} is not an option; give those of `quire serve`, with underscores, and "
                    f"{', '.join(options_of(RayOptions))}"
                )
            values[part][name] = _value(options_of(tables[part])[name], value)
        start = {name: values["client"].pop(name) for name in ("start_timeout",) if name in values["client"]}
        values["engine"] = {"preload_grammars": True, **values["engine"], **start}
        options = cls(RayOptions(**values.pop("ray")), **values)
        EngineArgs(**options.engine)  # so that the first bad value is reported here
        EngineArgs(**options.client)
        options.server_args.all_api_keys()
        return options


def _value(row: Option, given: Any) -> Any:
    """Return the value of an option. Raises `ValueError`."""
    if row.is_list:
        given = tuple(given.split(",")) if isinstance(given, str) else tuple(given)
    elif isinstance(given, str) and row.type is bool:
        given = _SWITCHES.get(given.lower(), given)
    elif isinstance(given, str) and not row.is_size:
        return row.parse(given)
    row.check(given)
    return given
