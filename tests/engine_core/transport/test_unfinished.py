"""Messages whose parts never end, sent by hand: no library of ours would."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from engine_process import DealerClient, EngineUnderTest
from patience import PATIENCE

from quire.protocol.keys import Security
from quire.protocol.messages import EngineCoreRequest, Ready, SamplingParams
from quire.protocol.sockets import MAX_READ_BYTES

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)  # of ZMTP 3.0
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
_MORE = 3  # flags of a long frame that is not the last of its message
OPEN = Security(insecure_tcp=True)


class Stranger:
    """A peer that speaks ZMTP by hand."""

    def __init__(self, address: str) -> None:
        kind, _, rest = address.partition("://")
        self._socket = socket.socket(socket.AF_UNIX if kind == "ipc" else socket.AF_INET)
        self._socket.settimeout(PATIENCE)
        host, _, port = rest.rpartition(":")
        self._socket.connect(rest if kind == "ipc" else (host, int(port)))
        self._socket.sendall(_GREETING)
        left = len(_GREETING)
        while left:
            received = self._socket.recv(left)
            assert received, "the engine has closed the connection"
            left -= len(received)
        self._socket.sendall(bytes([4, len(_READY)]) + _READY)

    def send_parts(self, size: int, most: int) -> int:
        """Send parts of one message until the connection is shut down; return the bytes sent, at most about `most`."""
        part, num_sent = bytes([_MORE]) + size.to_bytes(8, "big") + bytes(size), 0
        self._socket.setblocking(False)
        with self._socket, suppress(ConnectionError):
            while num_sent < most:
                readable, writable, _ = select.select([self._socket], [self._socket], [], PATIENCE)
                assert readable or writable
                if readable and not self._socket.recv(1024):  # its end; what is sent no longer arrives
                    break
                if writable:
                    num_sent += self._socket.send(memoryview(part)[num_sent % len(part) :])
        return num_sent


@pytest.fixture(scope="module", params=["ipc", "tcp"])
def open_engine(request: pytest.FixtureRequest, demo_model: Path) -> Iterator[EngineUnderTest]:
    address = "tcp://127.0.0.1:0" if request.param == "tcp" else None
    with EngineUnderTest(demo_model, "--insecure-tcp", address=address) as engine:
        yield engine


@pytest.mark.parametrize("size", [8 << 20, 1 << 16])
def test_a_message_without_end_is_cut_off(open_engine: EngineUnderTest, size: int) -> None:
    most = 16 * MAX_READ_BYTES  # far more than the engine may take
    with DealerClient(open_engine.address, security=OPEN) as client:
        assert client.first(Ready)
        assert Stranger(open_engine.address).send_parts(size, most) < most / 4
        client.send(EngineCoreRequest("large", [7] * 1_500_000, SamplingParams(max_tokens=1)))
        assert client.end("large").error  # too long for the model, and read whole
        client.send(EngineCoreRequest("small", [7], SamplingParams(max_tokens=2, ignore_eos=True)))
        assert client.end("small").error is None
