"""Log lines, as text and as JSON."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from quire.frontend.http.transport.logs import LogFormat, access_log, configure_logging

NAMES = ("quire", "uvicorn", "uvicorn.access", "uvicorn.error")


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in NAMES]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


def configured(log_format: LogFormat, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure_logging(level, log_format, stream)
    return stream


def scope(path: str = "/v1/chat/completions", client: tuple[str, int] | None = ("10.0.0.7", 51000)) -> dict[str, Any]:
    """The ASGI scope of a request, whose key and query string must never be logged."""
    headers = [(b"authorization", b"Bearer SECRET")]
    return {"method": "POST", "path": path, "query_string": b"key=SECRET", "headers": headers, "client": client}


def test_an_answered_request_in_json() -> None:
    stream = configured("json")
    access_log(scope(), 200, 0.1234567, 512, "req-1")
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("Z")
    assert "SECRET" not in line.pop("message")
    assert line == {
        "level": "info",
        "logger": "quire.access",
        "request_id": "req-1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "duration_ms": 123.457,
        "bytes": 512,
        "client": "10.0.0.7:51000",
    }


def test_an_answered_request_in_text() -> None:
    stream = configured("text")
    access_log(scope(client=None), 429, 0.002, 10, "req-1")
    assert stream.getvalue().endswith(
        " INFO    quire.access: - POST /v1/chat/completions 429 in 2.0 ms, 10 bytes, request req-1\n"
    )


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_text_of_a_client_stays_on_its_line(log_format: LogFormat) -> None:
    stream = configured(log_format)
    access_log(scope("/a\nINFO forged\x1b[2J/" + "x" * 10_000), 404, 0.0, 0, "id\r\nforged\u2028" + "y" * 10_000)
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue()[:-1].isprintable()
    assert len(stream.getvalue()) < 3000


def test_probes_are_logged_for_debugging_only() -> None:
    for level, count in (("info", 0), ("debug", 3)):
        stream = configured("text", level)
        access_log(scope("/quire/health") | {"root_path": "/quire"}, 200, 0.001, 2, "a")
        access_log(scope("/health"), 200, 0.001, 2, "a")
        access_log(scope("/metrics"), 200, 0.001, 2, None)
        assert stream.getvalue().count("\n") == count


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_exceptions_are_logged_with_their_traceback(log_format: LogFormat) -> None:
    stream = configured(log_format)
    try:
        json.loads("{")
    except ValueError:
        logging.getLogger("quire.frontend.http.app").exception("a request of %s failed", "x")
    said = json.loads(stream.getvalue())["exception"] if log_format == "json" else stream.getvalue()
    assert "Traceback" in said
    assert "JSONDecodeError: Expecting" in said


def test_uvicorn_logs_in_the_same_format_but_no_responses() -> None:
    stream = configured("json")
    logging.getLogger("uvicorn.error").info("Started server process")  # which the command line reports
    logging.getLogger("uvicorn.error").warning("Something is amiss")
    logging.getLogger("uvicorn.access").warning("GET /")
    assert json.loads(stream.getvalue())["message"] == "Something is amiss"


def test_a_second_configuration_replaces_the_first() -> None:
    first, second = configured("text"), configured("text")
    logging.getLogger("quire").warning("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_unknown_levels_and_formats_are_rejected() -> None:
    with pytest.raises(ValueError, match="log_level='loud' is not known; it can be debug"):
        configure_logging("loud")
    with pytest.raises(ValueError, match="log_format='xml' is not known; it can be text or json"):
        configure_logging("info", "xml")  # type: ignore[arg-type]
