"""Sockets: an engine binds one ROUTER, each client connects one DEALER.

A client::

    context = zmq.Context()
    socket = connect_client(context, "ipc:///tmp/quire-x/engine.sock")
    decoder = ClientDecoder()
    socket.send_multipart(encode(Hello(PROTOCOL_VERSION, "notebook")))
    ready = decoder.decode(socket.recv_multipart())            # Ready, or a fatal ErrorMessage: stop
    socket.send_multipart(encode(EngineCoreRequest("r1", [1, 2, 3], SamplingParams(max_tokens=8))))
    while True:
        message = decoder.decode(socket.recv_multipart())      # EngineCoreOutputs, Pong, ErrorMessage, ...
        # r1 ends with the output that has a finish_reason; meanwhile read, or send Ping every
        # ready.heartbeat_seconds, and take the engine for dead when it is silent for several of them
    socket.send_multipart(encode(Goodbye()))

A connection is a session. The engine knows it by a random id that libzmq gives each connection, so no client can take
another's stream. A connection that was lost and made again (libzmq does so by itself) is unknown: its next message is
answered with a fatal ErrorMessage, and everything in flight is lost; say Hello again. A socket belongs to one thread,
and a process that forks must connect anew in the child.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any, TypeVar

import zmq

from quire.protocol.address import claim_path, in_use, ipc_path
from quire.protocol.codec import MAX_FRAME_BYTES, MAX_REPLY_BYTES
from quire.protocol.errors import AddressError
from quire.protocol.keys import NO_KEYS, Security, secure_client, secure_engine

# Small, so that a slow client's increments wait where they merge. The engine reads its own queue at once.
_ENGINE_SEND_MESSAGES = 16
_CLIENT_RECEIVE_MESSAGES = 64

_MAX_SUBSCRIPTION, _MAX_REPLAY_REQUEST = 1024, 64  # bytes
_UNPROTECTED = Security(insecure_tcp=True)  # of addresses that their options have allowed

MAX_READ_BYTES = 8 * MAX_FRAME_BYTES
"""Largest frame that an engine reads: one beyond MAX_FRAME_BYTES is answered with an error, beyond this the connection
is closed before it is read."""

S = TypeVar("S", bound="zmq.Socket[Any]")


def bind_engine(context: zmq.Context[S], address: str, security: Security = NO_KEYS) -> S:
    """Return the engine's bound ROUTER; its endpoint is `socket.last_endpoint`.

    With keys, make the context's `Gate` first. Sending raises EHOSTUNREACH for a client that is gone and EAGAIN for one
    that does not read; nothing is dropped silently. Raises AddressError and KeyFileError.
    """
    with _open(context, zmq.ROUTER, address, security) as socket:
        socket.router_mandatory = True
        socket.router_handover = False  # an id stays with the connection that has it
        socket.sndhwm = _ENGINE_SEND_MESSAGES
        socket.maxmsgsize = MAX_READ_BYTES
        socket.backlog = 512
        if security.keys is not None:
            secure_engine(socket, security.keys)
        _bind_either(socket, address)
    return socket


def connect_client(context: zmq.Context[S], address: str, security: Security = NO_KEYS) -> S:
    """Return a client's DEALER; libzmq retries until the engine is there. Raises AddressError and KeyFileError."""
    with _open(context, zmq.DEALER, address, security) as socket:
        socket.rcvhwm = _CLIENT_RECEIVE_MESSAGES
        socket.maxmsgsize = MAX_REPLY_BYTES
        socket.reconnect_ivl_max = 2000
        if security.keys is not None:
            secure_client(socket, security.keys)
        _connect(socket, address)
    return socket


def open_publisher(context: zmq.Context[S], address: str, most: int, *, binds: bool) -> S:
    """Return a PUB, which is bound or connects to a subscriber that is. Raises AddressError.

    A subscriber for which `most` messages wait misses further ones.
    """
    with _open(context, zmq.PUB, address, _UNPROTECTED) as socket:
        socket.sndhwm = most
        socket.maxmsgsize = _MAX_SUBSCRIPTION
        (_bind_either if binds else _connect)(socket, address)
    return socket


def bind_replay(context: zmq.Context[S], address: str, most: int) -> S:
    """Return a bound ROUTER which holds up to `most` messages for a client, and takes short ones only.

    Raises AddressError.
    """
    with _open(context, zmq.ROUTER, address, _UNPROTECTED) as socket:
        socket.router_mandatory = True
        socket.sndhwm = most
        socket.maxmsgsize = _MAX_REPLAY_REQUEST
        _bind_either(socket, address)
    return socket


@contextlib.contextmanager
def _open(context: zmq.Context[S], kind: int, address: str, security: Security) -> Iterator[S]:
    """Open a socket with the settings of both sides; close it if the body of the `with` fails."""
    if ipc_path(address) is None and security.keys is None and not security.insecure_tcp:
        raise AddressError(
            f"address {address!r}: anyone who reaches the port could connect; give a folder of CURVE keys, "
            "use an ipc:// address, or allow it explicitly with insecure_tcp"
        )
    socket = context.socket(kind)
    socket.linger = 500  # ms: time to send a Goodbye, without waiting for a dead peer
    socket.ipv6 = "[" in address
    socket.tcp_keepalive = 1  # a host that is gone sends no FIN
    socket.tcp_keepalive_idle = 30
    socket.tcp_keepalive_intvl = 10
    socket.tcp_keepalive_cnt = 3
    socket.tcp_maxrt = 60_000  # ms; the same where something waits to be acknowledged
    try:
        yield socket
    except BaseException:
        socket.close(linger=0)
        raise


@contextlib.contextmanager
def _only_for_owner() -> Iterator[None]:
    """Create files with mode 0600 in the body of the `with`: a chmod afterwards would let others in before it."""
    mask = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(mask)


def _connect(socket: zmq.Socket[Any], address: str) -> None:
    path = ipc_path(address)
    try:
        socket.connect(f"ipc://{path}" if path else address)
    except zmq.ZMQError as error:
        raise AddressError(f"address {address!r} cannot be connected to: {error.strerror}") from error


def _bind_either(socket: zmq.Socket[Any], address: str) -> None:
    """Bind to a port, or to a path that nobody else uses and that is the owner's alone."""
    path = ipc_path(address)
    if path is None:
        _bind(socket, address, address)
        return
    with claim_path(address, path), _only_for_owner():
        _bind(socket, address, f"ipc://{path}")


def _bind(socket: zmq.Socket[Any], address: str, endpoint: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise in_use(address) from error
        raise AddressError(
            f"address {address!r} cannot be bound: {error.strerror}; name an interface of this host and a free port"
        ) from error
