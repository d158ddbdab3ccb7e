"""Encoding of messages as frames. Every frame decodes into a declared type or raises ProtocolError naming the field.

A message is one msgpack frame. Large arrays will travel as further frames once a message has any; until then a message
of several frames is malformed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar, cast, get_args

import msgspec

from quire.protocol.errors import FrameTooLargeError, ProtocolError
from quire.protocol.fields import explain
from quire.protocol.messages import ClientMessage, EngineMessage

MAX_FRAME_BYTES = 8 << 20
"""Largest frame that an engine accepts from a client: room for a prompt of 1.6 million tokens."""

MAX_REPLY_BYTES = 256 << 20
"""Largest frame that a client accepts from its engine."""

_ENCODER = msgspec.msgpack.Encoder()

M = TypeVar("M")


def encode(message: ClientMessage | EngineMessage) -> list[bytes]:
    """Return the frames of a message, for `send_multipart`.

    Raises FrameTooLargeError for a message that is too large for its receiver, and ProtocolError for a value that
    cannot be encoded, such as a numpy integer among token ids.
    """
    name = type(message).__name__
    try:
        frame = _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError) as error:  # ValueError: a lone surrogate in a text
        raise ProtocolError(f"{name} cannot be encoded: {error}") from error
    if len(frame) > MAX_FRAME_BYTES:
        limit = MAX_FRAME_BYTES if isinstance(message, ClientMessage) else MAX_REPLY_BYTES
        check_size(frame, limit, name)
    return [frame]


def check_size(frame: bytes, limit: int, name: str = "the frame") -> None:
    """Raise FrameTooLargeError if `frame` has more than `limit` bytes."""
    if len(frame) > limit:
        raise FrameTooLargeError(
            f"{name} has {len(frame)} bytes, at most {limit} are accepted; send a shorter prompt or shorter token lists"
        )


class _Decoder(Generic[M]):
    """Decoder of frames of at most `limit` bytes into the messages of a union."""

    def __init__(self, union: object, limit: int) -> None:
        self._types: tuple[type[msgspec.Struct], ...] = get_args(union)
        self._decode = msgspec.msgpack.Decoder(union).decode
        self._limit = limit

    def decode(self, frames: Sequence[bytes]) -> M:
        """Return the message in `frames`. Raises FrameTooLargeError, and ProtocolError naming the field."""
        if len(frames) != 1:
            raise ProtocolError(f"a message is one frame, this one has {len(frames)}; send it without an envelope")
        frame = frames[0]
        check_size(frame, self._limit)
        try:
            return cast("M", self._decode(frame))
        except RecursionError as error:
            raise ProtocolError("the frame is nested too deeply to be a message") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(explain(error, frame, self._types)) from error


class ClientDecoder(_Decoder[EngineMessage]):
    """Decoder of the messages that a client receives."""

    def __init__(self) -> None:
        super().__init__(EngineMessage, MAX_REPLY_BYTES)


class EngineDecoder(_Decoder[ClientMessage]):
    """Decoder of the messages that an engine receives."""

    def __init__(self) -> None:
        super().__init__(ClientMessage, MAX_FRAME_BYTES)
