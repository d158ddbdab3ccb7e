"""The options of the HTTP server, section "HTTP server" of the table of options, and its API keys."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from quire.protocol.engine_options import COUNT, LOG_LEVELS, SECONDS, SECONDS_OR_ZERO
from quire.protocol.options import MAX_INT64, Option, Range, check_options, parse_size

API_KEY_VARIABLE = "QUIRE_API_KEY"
_HOST_NAME = re.compile(r"\*|(?:\*\.)?[\w-]+(?:\.[\w-]+)*")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")
NO_ORIGIN = "none"
"""The origin that stands for no page at all."""

ENTRY_BODIES = 4
"""A stored response with its conversation may have the size of this many bodies."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """Address and access of the server, and limits of a request. Raises `ValueError` for a bad value.

    HTTP server:
        host: Address to listen at; 127.0.0.1 is reached from this machine only.
        port: Port; 0 takes a free one. Default: 8000, or the next free one.
        uds: Path of a UNIX socket, instead of host and port.
        api_key: Key that clients must send, except for /health, /v1/health and /ping. $QUIRE_API_KEY holds keys as
            well; it and a file stay out of the list of processes and of shell histories.
        api_key_file: File of such keys, one a line.
        served_model_name: Name of the model for clients; answers have the first. Default: its name, or its folder's.
        root_path: Path where a proxy shows the server, such as /quire.
        allowed_origins: Origin of web pages that may call the server (CORS); * for all, none for no pages. Default:
            pages on this machine.
        allowed_hosts: Host name that clients may address, *.NAME for its subdomains, * for any; IP addresses and
            localhost are always allowed. Default: any; on a loopback address none.
        allowed_lora_folders: Folder in which adapters may be that clients load by their paths, links resolved; / for
            any. Default: none, so that clients load adapters of the Hugging Face hub only.
        log_level: Least level of messages on stderr; info: a line for each request.
        log_format: json: an object a line.
        metrics_prefix: Prefix of the names at /metrics; vllm fits dashboards and routers made for vLLM.
        metrics_without_key: Answer /metrics to whoever has no API key, as routers of Kubernetes have none.
        otlp_traces_endpoint: Send an OpenTelemetry span for each request there. Default: OTEL_EXPORTER_OTLP_*.
        ssl_certfile: TLS: certificate chain, PEM.
        ssl_keyfile: TLS: private key, PEM.
        ssl_keyfile_password: Password of the private key.
        max_body_bytes: Largest body of a request.
        body_timeout: Seconds for a body to arrive.
        header_timeout: Seconds for the headers of a request to arrive.
        send_timeout: Seconds that a client may read nothing of its answer.
        max_connections: Connections at once; further ones get status 503.
        server_memory_limit: Memory of the server's process, as 4GiB; beyond it requests get status 503.
        max_prompts: Completions of a request: its prompts times n.
        request_timeout: Seconds after which a request ends; the header X-Request-Timeout sets less. Default: no limit.
        trust_request_chat_template: Let clients bring chat templates, which are programs in a sandbox.
        keep_alive: Seconds that an idle connection stays open.
        admin_key_file: File of the keys with which the set of engines can be changed, models loaded and unloaded by
            /models/load and /models/unload, and adapters, one a line; an API key is not needed besides. Default:
            whoever reaches the server can load and unload models, and change the engines if it has no API keys.
        share_prefix_cache: Let API keys share cached prefixes; each can then tell by times what others have sent.
        max_requests_per_key: Requests of an API key that may be open at once. Default: no limit.
        max_tokens_per_minute_per_key: Tokens of prompts and answers that an API key may take. Default: no limit.
        response_store: SQLite file that keeps responses of the Responses API, for store and previous_response_id.
            Default: nothing is stored.
        response_store_entries: Responses that are kept; beyond, the oldest of the API key with the most goes.
        response_store_size: Size of the file, as 1GiB; beyond, the oldest of the API key with the most goes.
        response_store_days: Days that a response is kept.
        models_dir: Folder whose checkpoints and GGUF files are served, each loaded by the first request for it.
        max_loaded: Models, of several, that are loaded at once; beyond, the least recently used one is unloaded.
            Default: as many as fit into memory.
        idle_timeout: Seconds without a request after which a model is unloaded until the next one. Default: never.

    Engine process:
        shutdown_timeout: Seconds that SIGTERM gives open requests to end; new ones are rejected.
    """

    host: Annotated[str, Option("HOST")] = "127.0.0.1"
    port: Annotated[int, Option("N", Range(0, 65535))] = 8000
    uds: Annotated[str | None, Option("PATH")] = None
    api_key: Annotated[tuple[str, ...], Option("KEY")] = ()
    api_key_file: Annotated[tuple[str, ...], Option("FILE")] = ()
    served_model_name: Annotated[tuple[str, ...], Option("NAME")] = ()
    root_path: Annotated[str, Option("PATH")] = ""
    allowed_origins: Annotated[tuple[str, ...], Option("ORIGIN")] = ()
    allowed_hosts: Annotated[tuple[str, ...], Option("NAME")] = ()
    allowed_lora_folders: Annotated[tuple[str, ...], Option("FOLDER")] = ()
    log_level: Annotated[str, Option("LEVEL", choices=LOG_LEVELS)] = "info"
    log_format: Annotated[str, Option("FORMAT", choices=("text", "json"))] = "text"
    metrics_prefix: Annotated[str, Option("WORD")] = "quire"
    metrics_without_key: Annotated[bool, Option()] = False
    otlp_traces_endpoint: Annotated[str | None, Option("URL")] = None
    ssl_certfile: Annotated[str | None, Option("FILE")] = None
    ssl_keyfile: Annotated[str | None, Option("FILE")] = None
    ssl_keyfile_password: Annotated[str | None, Option("TEXT")] = None
    max_body_bytes: Annotated[int, Option("BYTES", Range(1, MAX_INT64))] = 8 << 20
    body_timeout: Annotated[float, Option("S", SECONDS)] = 30.0
    header_timeout: Annotated[float, Option("S", SECONDS)] = 30.0
    send_timeout: Annotated[float, Option("S", SECONDS)] = 300.0
    max_connections: Annotated[int, Option("N", COUNT)] = 4096
    server_memory_limit: Annotated[int | str, Option("SIZE")] = "4GiB"
    max_prompts: Annotated[int, Option("N", COUNT)] = 1024
    request_timeout: Annotated[float | None, Option("S", SECONDS)] = None
    shutdown_timeout: Annotated[float, Option("S", SECONDS_OR_ZERO)] = 30.0
    trust_request_chat_template: Annotated[bool, Option()] = False
    keep_alive: Annotated[float, Option("S", SECONDS)] = 60.0
    admin_key_file: Annotated[str | None, Option("FILE")] = None
    share_prefix_cache: Annotated[bool, Option()] = False
    max_requests_per_key: Annotated[int | None, Option("N", COUNT)] = None
    max_tokens_per_minute_per_key: Annotated[int | None, Option("TOKENS", COUNT)] = None
    response_store: Annotated[str | None, Option("PATH")] = None
    response_store_entries: Annotated[int, Option("N", COUNT)] = 10_000
    response_store_size: Annotated[int | str, Option("SIZE")] = "1GiB"
    response_store_days: Annotated[float, Option("DAYS", SECONDS)] = 30.0
    models_dir: Annotated[str | None, Option("FOLDER")] = None
    max_loaded: Annotated[int | None, Option("N", COUNT)] = None
    idle_timeout: Annotated[float | None, Option("S", SECONDS)] = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"root_path={self.root_path!r} must begin with / and not end with one, such as /quire")
        for name in self.allowed_hosts:
            if not _HOST_NAME.fullmatch(name):
                raise ValueError(
                    f"allowed_hosts={name!r} is not a host name; give one without scheme and port, such as "
                    "llm.example.com, or *.example.com for its subdomains, or * for any"
                )
        for origin in self.allowed_origins:
            if origin != NO_ORIGIN and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins={origin!r} is not an origin; give scheme, host and port of the page, no path, "
                    f"such as https://chat.example.com, or * for all, or {NO_ORIGIN}"
                )
        if NO_ORIGIN in self.allowed_origins and len(self.allowed_origins) > 1:
            raise ValueError(f"allowed_origins has {NO_ORIGIN!r} and others; give the one or the other")
        self._check_store()
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile is of no use without ssl_certfile; give both")
        for name in ("ssl_certfile", "ssl_keyfile"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ValueError(f"{name}={path!r} is not a file; give the path of a PEM file")

    def _check_store(self) -> None:
        size = parse_size(str(self.response_store_size))
        if self.response_store is not None and size < (least := 2 * ENTRY_BODIES * self.max_body_bytes):
            raise ValueError(
                f"response_store_size={self.response_store_size!r} is too small for a conversation of max_body_bytes="
                f"{self.max_body_bytes}; give {least} or more, or lower max_body_bytes"
            )

    def all_api_keys(self) -> list[str]:
        """Return the keys given, those in the files, and those in $QUIRE_API_KEY, which are separated by commas.

        Raises `ValueError` for a file that cannot be read or a key that cannot be sent in a header.
        """
        if not all(key.strip() for key in self.api_key):
            raise ValueError("an API key is empty, and would leave the server open; give one, or leave --api-key out")
        keys = [*self.api_key, *os.environ.get(API_KEY_VARIABLE, "").split(",")]
        for path in self.api_key_file:
            keys += keys_of(path)
        keys = [key.strip() for key in keys if key.strip()]
        for key in keys:
            if not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError(
                    "an API key holds a character that no header can carry; use printable ASCII, no spaces"
                )
        if not keys:
            for name in ("max_requests_per_key", "max_tokens_per_minute_per_key"):
                if (quota := getattr(self, name)) is not None:
                    raise ValueError(f"{name}={quota} is a quota of API keys, and there are none; give --api-key too")
        return list(dict.fromkeys(keys))

    def admin_keys(self) -> Sequence[str]:
        """Return the keys of administrators. Raises `ValueError` for a file that cannot be read."""
        return () if self.admin_key_file is None else keys_of(self.admin_key_file)

    def shows_prompts(self) -> bool:
        """Return whether the page may show texts of prompts: all who can see it are one party.

        That is so with a single API key, and without one where no other machine reaches the server. Raises `ValueError`
        like `all_api_keys`.
        """
        num_keys, is_local = len(self.all_api_keys()), self.uds is not None or self.host in _LOOPBACK
        return num_keys == 1 or (num_keys == 0 and is_local)


def keys_of(path: str) -> Sequence[str]:
    """Return the keys in a file, one a line. Raises `ValueError` for a file that cannot be read or has none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file of keys {path} cannot be read: {error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ValueError(f"the file of keys {path} holds none; write one a line, or leave it out")
    return keys
