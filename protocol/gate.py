"""The gate: tells libzmq which CURVE keys to let in (ZAP, rfc.zeromq.org/spec/27), on the engine's IO thread.

pyzmq's authenticators do the same on a thread or an event loop of their own; one more socket in our poller is enough.
"""

from __future__ import annotations

from typing import Any

import zmq
from zmq.utils import z85

_ENDPOINT = "inproc://zeromq.zap.01"


class Gate:
    """Answers libzmq's questions for one context. Make it before the socket it guards is bound."""

    def __init__(self, context: zmq.Context[Any], allowed: frozenset[bytes]) -> None:
        """`allowed`: public keys in Z85."""
        self._allowed = frozenset(z85.decode(key) for key in allowed)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)
        self.refused = 0

    def answer(self) -> None:
        """Answers the question that waits; call it when `socket` is readable."""
        version, request_id, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        welcome = mechanism == b"CURVE" and credentials[0] in self._allowed
        self.refused += not welcome
        status, text = (b"200", b"OK") if welcome else (b"400", b"this key is not in authorized_clients")
        self.socket.send_multipart([version, request_id, status, text, b"", b""])

    def close(self) -> None:
        """Closes the socket; whoever comes now is refused."""
        self.socket.close()
