"""Server-sent events as they arrive."""

from __future__ import annotations

_MOST_BYTES = 1 << 26


class EventLines:
    """Cuts a stream into the data of its events, of which each is one line with OpenAI's API.

    Raises `ValueError` for an event longer than 64 MiB.
    """

    def __init__(self) -> None:
        self._begun = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take a piece of the stream; returns the data of the events that are whole now."""
        *lines, self._begun = (self._begun + data).split(b"\n") if self._begun else data.split(b"\n")
        if len(self._begun) > _MOST_BYTES:
            raise ValueError(f"an event of the stream is longer than {_MOST_BYTES >> 20} MiB")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
