"""Responses to HTTP/1.0, whose clients know neither chunks nor interim responses."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def is_old(http_version: str) -> bool:
    """Return whether a version of HTTP is older than 1.1."""
    return http_version in {"0.9", "1.0"}


def adapt_to_old_client(cycle: RequestResponseCycle) -> None:
    """Let a response end by the end of its connection unless it has a length (RFC 9112, section 6.3)."""
    send, is_bounded = cycle.send, False
    cycle.keep_alive = False
    cycle.waiting_for_100_continue = False

    async def send_without_chunks(message: Any) -> None:
        nonlocal is_bounded
        if message["type"] == "http.response.start":
            is_bounded = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not is_bounded:
                cycle.chunked_encoding = False
        elif not is_bounded:
            cycle.expected_content_length = len(message.get("body", b""))  # of this part, which passes any check
        await send(message)

    cycle.send = send_without_chunks  # type: ignore[method-assign]
