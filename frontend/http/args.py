"""How the HTTP server is set up, and what is refused before it starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

API_KEY_VARIABLE = "QUIRE_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """Where and for whom the server listens, and what a request may cost.

    host, port: where; port 0 takes a free one. uds: a UNIX socket's path instead.
    api_keys: with any, every route but /health asks for one of them. api_key_files: files with a key a line.
    served_model_names: what clients call the model; the first is what they are told. None: the folder's name.
    root_path: where a proxy shows the server, if not at /. cors_origins: web pages that may call it; "*" for all.
    ssl_certfile, ssl_keyfile: TLS. ssl_keyfile_password: of the key.
    max_body_bytes, body_timeout (seconds to read it), max_prompts (of one request, times `n`): more is refused.
    header_timeout: seconds that a connection may take to send the headers of a request; send_timeout: seconds that a
    client may read nothing of what was sent. max_connections: at once; further ones are told to try again.
    request_timeout: seconds after which any request ends, None for no limit; the header X-Request-Timeout sets less.
    trust_request_chat_template: whether clients may bring chat templates, which are programs that need not end.
    drain_seconds: what open requests get after SIGTERM.
    keep_alive: seconds that an idle connection stays open.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_keys: tuple[str, ...] = ()
    api_key_files: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    root_path: str = ""
    cors_origins: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    max_body_bytes: int = 32 << 20
    body_timeout: float = 30.0
    header_timeout: float = 30.0
    send_timeout: float = 300.0
    max_connections: int = 4096
    max_prompts: int = 1024
    request_timeout: float | None = None
    drain_seconds: float = 30.0
    trust_request_chat_template: bool = False
    keep_alive: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port} is not a port; give 1 to 65535, or 0 for a free one")
        for name in ("max_body_bytes", "max_connections", "max_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} allows nothing; give 1 or more")
        for name in ("header_timeout", "body_timeout", "send_timeout", "request_timeout", "keep_alive"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e9:
                raise ValueError(f"{name}={value} is not a time; give seconds above 0")
        if not 0 <= self.drain_seconds < 1e9:
            raise ValueError(f"drain_seconds={self.drain_seconds} is not a time; give seconds, 0 to end at once")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"root_path={self.root_path!r} must begin with / and not end with one, such as /quire")
        self._check_files()

    def _check_files(self) -> None:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile is of no use without ssl_certfile; give both")
        for name in ("ssl_certfile", "ssl_keyfile"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ValueError(f"{name}={path!r} is not a file; give the path of a PEM file")

    def all_api_keys(self) -> list[str]:
        """Keys given, those of the files, and those of $QUIRE_API_KEY, which are separated by commas.

        Raises `ValueError` for a file that can't be read or a key that can't be sent in a header.
        """
        if not all(key.strip() for key in self.api_keys):
            raise ValueError("an API key is empty, and would leave the server open; give one, or leave --api-key out")
        keys = [*self.api_keys, *os.environ.get(API_KEY_VARIABLE, "").split(",")]
        for path in self.api_key_files:
            keys += _keys_of(path)
        keys = [key.strip() for key in keys if key.strip()]
        for key in keys:
            if not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError(
                    "an API key holds a character that no header can carry; use printable ASCII, no spaces"
                )
        return list(dict.fromkeys(keys))


def _keys_of(path: str) -> Sequence[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file of API keys {path} can't be read: {error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ValueError(f"the file of API keys {path} holds none; write one a line, or leave it out")
    return keys
