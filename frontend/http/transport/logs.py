"""The server's log, as text for people or JSON for programs, with a line for each request.

Its rate is bounded (`protocol/log_limit.py`). No prompt, no answer, no header and no query string (in which some
clients put their keys) is ever logged here.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO
from urllib.parse import quote

from quire.protocol.log_limit import LimitedHandler

LogFormat = Literal["text", "json"]

_LEVELS = ("debug", "info", "warning", "error", "critical")
_LOGGERS = ("quire", "uvicorn", "asyncio")  # with their children, such as uvicorn.error
_QUIET = {"/health", "/load", "/metrics", "/ping", "/ready", "/v1/health"}  # polled by programs every few seconds
_MAX_CHARS = 500  # of a path or an id, which clients choose
_FIELDS = ("request_id", "method", "path", "status", "duration_ms", "bytes", "client")

_ACCESS = logging.getLogger("quire.access")


def configure_logging(level: str = "info", log_format: LogFormat = "text", stream: TextIO | None = None) -> None:
    """Make the server's loggers write to `stream` (stderr if None), and only there.

    Raises `ValueError` for an unknown level or format.
    """
    if level not in _LEVELS:
        raise ValueError(f"log_level={level!r} is not known; it can be {', '.join(_LEVELS)}")
    if log_format not in ("text", "json"):
        raise ValueError(f"log_format={log_format!r} is not known; it can be text or json")
    handler = LimitedHandler(stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        # uvicorn's startup messages are redundant: the command line prints the server's URL.
        logger.setLevel("WARNING" if name == "uvicorn" and level == "info" else level.upper())
        logger.propagate = False
    for name in ("uvicorn.access", "uvicorn.error"):
        below = logging.getLogger(name)
        below.handlers.clear()
        below.propagate = name != "uvicorn.access"  # `access_log` replaces it


class TextFormatter(logging.Formatter):
    """A line of text for people, followed by an exception's traceback."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class has it so
        """Return one line: text that clients chose can't start another."""
        return _one_line(super().formatMessage(record))


class JsonFormatter(logging.Formatter):
    """A JSON object per line: time (UTC), level, logger, message, the fields of a finished request, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
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
        return json.dumps(entry)  # in ASCII, so without line breaks


def access_log(
    scope: MutableMapping[str, Any], status: int, duration: float, bytes_sent: int, request_id: str | None
) -> None:
    """Log a finished request at level INFO, or DEBUG for the endpoints that programs poll.

    `scope` is ASGI's, `duration` is in seconds, `bytes_sent` counts the body.
    """
    own_path = scope["path"].removeprefix(scope.get("root_path", ""))
    level = logging.DEBUG if own_path in _QUIET else logging.INFO
    if not _ACCESS.isEnabledFor(level):
        return
    path = quote(scope["path"], safe="/:@!$&'()*+,;=~-._")[:_MAX_CHARS]
    client = _client(scope)
    request_id = None if request_id is None else request_id[:_MAX_CHARS]
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
    """Return address and port, or "-" for a client of a UNIX socket."""
    client = scope.get("client")
    return "-" if client is None else f"{client[0]}:{client[1]}"


def _one_line(text: str) -> str:
    return text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
