"""What the server writes to its log: lines for people, or JSON for programs; and which requests it has answered.

No prompt, no answer, no header and no query string (in which some clients put their keys) is ever logged here.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO
from urllib.parse import quote

LogFormat = Literal["text", "json"]

_LEVELS = ("debug", "info", "warning", "error", "critical")
_LOGGERS = ("quire", "uvicorn")  # uvicorn.error and the like are below it
_QUIET = {"/health", "/ready", "/metrics"}  # asked for every few seconds, by programs
_MOST_CHARS = 500  # of a path or an id, which a client has chosen
_FIELDS = ("request_id", "method", "path", "status", "duration_ms", "bytes", "client")

_ACCESS = logging.getLogger("quire.access")


def configure_logging(level: str = "info", log_format: LogFormat = "text", stream: TextIO | None = None) -> None:
    """Let the server's loggers write to `stream` (stderr if None), in place of what they wrote to before.

    Raises `ValueError` for a level or a format that there is not.
    """
    if level not in _LEVELS:
        raise ValueError(f"log_level={level!r} is not known; it can be {', '.join(_LEVELS)}")
    if log_format not in ("text", "json"):
        raise ValueError(f"log_format={log_format!r} is not known; it can be text or json")
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        # That uvicorn has started is no news: the command line says where the server is.
        logger.setLevel("WARNING" if name == "uvicorn" and level == "info" else level.upper())
        logger.propagate = False
    for name in ("uvicorn.access", "uvicorn.error"):
        below = logging.getLogger(name)
        below.handlers.clear()
        below.propagate = name != "uvicorn.access"  # `access_log` has more to tell


class TextFormatter(logging.Formatter):
    """A line for people; an exception's traceback follows it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class has it so
        """One line: what a client has chosen can't begin another."""
        return _one_line(super().formatMessage(record))


class JsonFormatter(logging.Formatter):
    """A JSON object in a line: time (UTC), level, logger, message, the fields of an answered request, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{whole}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)  # in ASCII: a line has no other end than the last


def access_log(
    scope: MutableMapping[str, Any], status: int, duration: float, bytes_sent: int, request_id: str | None
) -> None:
    """Log a request that has ended: level INFO, or DEBUG for those that only look whether the server lives.

    `scope` is ASGI's, `duration` in seconds, `bytes_sent` are those of the body.
    """
    own_path = scope["path"].removeprefix(scope.get("root_path", ""))
    level = logging.DEBUG if own_path in _QUIET else logging.INFO
    if not _ACCESS.isEnabledFor(level):
        return
    path = quote(scope["path"], safe="/:@!$&'()*+,;=~-._")[:_MOST_CHARS]
    client = _client(scope)
    request_id = None if request_id is None else request_id[:_MOST_CHARS]
    values = request_id, scope["method"], path, status, round(duration * 1000, 3), bytes_sent, client
    _ACCESS.log(
        level,
        "%s %s %s %d in %.1f ms, %d bytes, request %s",
        client,
        scope["method"],
        path,
        status,
        duration * 1000,
        bytes_sent,
        request_id,
        extra=dict(zip(_FIELDS, values, strict=True)),
    )


def _client(scope: MutableMapping[str, Any]) -> str:
    """Address and port; a client of a UNIX socket has none."""
    client = scope.get("client")
    return "-" if client is None else f"{client[0]}:{client[1]}"


def _one_line(text: str) -> str:
    return text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
