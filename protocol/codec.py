"""Encoding of messages as frames. Every frame decodes into a declared type or raises ProtocolError naming the field.

A message is one msgpack frame. The data of a KvPage follows in a frame of its own, which is not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar, cast, get_args

import msgspec

from quire.protocol.errors import FrameTooLargeError, ProtocolError
from quire.protocol.fields import explain
from quire.protocol.messages import ClientMessage, EngineMessage, KvPage

Frame = bytes | memoryview
"""One part of a ZeroMQ message; only data that is not to be copied is a memoryview."""

MAX_FRAME_BYTES = 8 << 20
"""Largest frame that an engine accepts from a client: room for a prompt of 1.6 million tokens."""

MAX_REPLY_BYTES = 256 << 20
"""Largest frame that a client accepts from its engine, that of data included."""

_ENCODER = msgspec.msgpack.Encoder()

M = TypeVar("M")


def encode(message: ClientMessage | EngineMessage) -> list[Frame]:
    """Return the frames of a message, for `send_multipart`.

    Raises FrameTooLargeError for a message that is too large for its receiver, and ProtocolError for a value that
    cannot be encoded, such as a numpy integer among token ids.
    """
    name = type(message).__name__
    data: list[Frame] = []
    if isinstance(message, KvPage):
        data, message = [memoryview(message.data)], KvPage(message.fetch_id, message.checksum)
        check_size(data[0], MAX_REPLY_BYTES, name)
    try:
        frame = _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError) as error:  # ValueError: a lone surrogate in a text
        raise ProtocolError(f"{name} cannot be encoded: {error}") from error
    if len(frame) > MAX_FRAME_BYTES:
        limit = MAX_FRAME_BYTES if isinstance(message, ClientMessage) else MAX_REPLY_BYTES
        check_size(frame, limit, name)
    return [frame, *data]


def check_size(frame: Frame, limit: int, name: str = "the frame") -> None:
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
        self._most_frames = 1 + (KvPage in self._types)

    def decode(self, frames: Sequence[Frame]) -> M:
        """Return the message in `frames`. Raises FrameTooLargeError, and ProtocolError naming the field."""
        if not 1 <= len(frames) <= self._most_frames:
            raise self._miscounted(frames)
        frame = frames[0]
        check_size(frame, self._limit)
        try:
            message = self._decode(frame)
        except RecursionError as error:
            raise ProtocolError("the frame is nested too deeply to be a message") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(explain(error, bytes(frame), self._types)) from error
        has_data = isinstance(message, KvPage)
        if len(frames) != 1 + has_data:
            raise self._miscounted(frames)
        if has_data:
            check_size(frames[1], self._limit)
            message.data = frames[1]
        return cast("M", message)

    def _miscounted(self, frames: Sequence[Frame]) -> ProtocolError:
        return ProtocolError(
            f"a message is one frame, a KvPage two, and this one has {len(frames)}; send it without an envelope"
        )


class ClientDecoder(_Decoder[EngineMessage]):
    """Decoder of the messages that a client receives."""

    def __init__(self) -> None:
        super().__init__(EngineMessage, MAX_REPLY_BYTES)


class EngineDecoder(_Decoder[ClientMessage]):
    """Decoder of the messages that an engine receives."""

    def __init__(self) -> None:
        super().__init__(ClientMessage, MAX_FRAME_BYTES)
