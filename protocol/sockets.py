"""The sockets: an engine binds one ROUTER, each client connects one DEALER.

How a client speaks::

    context = zmq.Context()
    socket = connect_client(context, "ipc:///tmp/quire-x/engine.sock")
    decoder = ClientDecoder()
    socket.send_multipart(encode(Hello(PROTOCOL_VERSION, "notebook")))
    ready = decoder.decode(socket.recv_multipart())            # Ready, or a fatal ErrorMessage: stop
    socket.send_multipart(encode(EngineCoreRequest("r1", [1, 2, 3], SamplingParams(max_tokens=8))))
    while True:
        message = decoder.decode(socket.recv_multipart())      # EngineCoreOutputs, Pong, ErrorMessage, ...
        # r1 is over with the output that has a finish_reason; meanwhile send Ping every
        # ready.heartbeat_seconds, and take silence of the engine for several of them as its death
    socket.send_multipart(encode(Goodbye()))

A connection is a session: the engine knows it by an id that libzmq draws for each connection, so no client can take
another's stream, and a connection that was lost and made again (libzmq does so by itself) is a stranger: its next
message is answered with a fatal ErrorMessage. Then everything in flight is lost; say Hello again. A socket belongs to
one thread, and a process that forks must connect anew in the child.
"""

from __future__ import annotations

import contextlib
import errno
from typing import Any, TypeVar

import zmq

from quire.protocol.address import claim_path, in_use, ipc_path
from quire.protocol.codec import MAX_FRAME_BYTES, MAX_REPLY_BYTES
from quire.protocol.errors import AddressError
from quire.protocol.keys import NO_KEYS, Security, secure_client, secure_engine

# Few, so that a slow client's increments wait where they merge. The engine's receiver is drained at once.
_ENGINE_SEND_MESSAGES = 16
_CLIENT_RECEIVE_MESSAGES = 64

# Beyond MAX_FRAME_BYTES a frame is answered with an error; beyond this libzmq cuts the connection before reading it.
_CUT_BYTES = 8 * MAX_FRAME_BYTES

S = TypeVar("S", bound="zmq.Socket[Any]")


def bind_engine(context: zmq.Context[S], address: str, security: Security = NO_KEYS) -> S:
    """The engine's ROUTER, bound; its endpoint is `socket.last_endpoint`. With keys, make the context's `Gate` first.

    Sending to a client that is gone raises EHOSTUNREACH, to one that does not read EAGAIN; nothing is dropped unseen.
    Raises AddressError and KeyFileError.
    """
    path = ipc_path(address)
    _check_transport(address, path is None, security)
    socket = context.socket(zmq.ROUTER)
    try:
        socket.router_mandatory = True
        socket.router_handover = False  # an id that is taken stays with the connection that has it
        socket.sndhwm = _ENGINE_SEND_MESSAGES
        socket.maxmsgsize = _CUT_BYTES
        socket.backlog = 512
        _set_common(socket, address)
        if security.keys is not None:
            secure_engine(socket, security.keys)
        with contextlib.nullcontext() if path is None else claim_path(address, path):
            _bind(socket, address, f"ipc://{path}" if path else address)
            if path is not None:
                path.chmod(0o600)
    except BaseException:
        socket.close(linger=0)
        raise
    return socket


def connect_client(context: zmq.Context[S], address: str, security: Security = NO_KEYS) -> S:
    """A client's DEALER; libzmq keeps trying until the engine is there. Raises AddressError and KeyFileError."""
    path = ipc_path(address)
    _check_transport(address, path is None, security)
    socket = context.socket(zmq.DEALER)
    try:
        socket.rcvhwm = _CLIENT_RECEIVE_MESSAGES
        socket.maxmsgsize = MAX_REPLY_BYTES
        socket.reconnect_ivl_max = 2000
        _set_common(socket, address)
        if security.keys is not None:
            secure_client(socket, security.keys)
        socket.connect(f"ipc://{path}" if path else address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise AddressError(f"address {address!r} cannot be connected to: {error.strerror}") from error
    except BaseException:
        socket.close(linger=0)
        raise
    return socket


def _check_transport(address: str, tcp: bool, security: Security) -> None:
    if tcp and security.keys is None and not security.insecure_tcp:
        raise AddressError(
            f"address {address!r}: tcp lets in whoever reaches the port; give a folder of CURVE keys, "
            "use an ipc:// address, or allow it explicitly with insecure_tcp"
        )


def _set_common(socket: zmq.Socket[Any], address: str) -> None:
    socket.linger = 500  # ms: a Goodbye still leaves, a dead peer does not hold the process
    socket.ipv6 = "[" in address
    socket.tcp_keepalive = 1  # a peer whose host is gone sends no FIN
    socket.tcp_keepalive_idle = 30
    socket.tcp_keepalive_intvl = 10
    socket.tcp_keepalive_cnt = 3


def _bind(socket: zmq.Socket[Any], address: str, endpoint: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise in_use(address) from error
        raise AddressError(
            f"address {address!r} cannot be bound: {error.strerror}; name an interface of this host and a free port"
        ) from error
