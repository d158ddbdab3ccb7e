"""Frames of bytes through a pipe: four bytes of length, little-endian, and then so many."""

from __future__ import annotations

from typing import IO

from quire.protocol.errors import ProtocolError

MAX_PIPE_FRAME_BYTES = 256 << 20
_LENGTH_BYTES = 4


def write_frame(stream: IO[bytes], frame: bytes) -> None:
    """Writes and flushes; returns when the pipe has taken it. BrokenPipeError if nobody reads."""
    stream.write(len(frame).to_bytes(_LENGTH_BYTES, "little"))
    stream.write(frame)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame, None at the end. ProtocolError for one that is too large or cut off."""
    head = stream.read(_LENGTH_BYTES)
    if not head:
        return None
    length = int.from_bytes(head, "little")
    if length > MAX_PIPE_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes is announced, at most {MAX_PIPE_FRAME_BYTES} are accepted")
    frame = stream.read(length)
    if len(head) < _LENGTH_BYTES or len(frame) < length:
        raise ProtocolError(f"the pipe ended in the middle of a frame, after {len(head) + len(frame)} bytes of it")
    return frame
