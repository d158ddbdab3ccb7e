"""The socket on which the server listens."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quire.frontend.http.args import ServerArgs


def bind(args: ServerArgs, port: int) -> socket.socket:
    """Return a socket bound as `args` asks, at this port. Raises `OSError` that says what to do."""
    return _tcp_socket(args, port) if args.uds is None else _unix_socket(args.uds)


@contextmanager
def removed(path: str | None) -> Iterator[None]:
    """Remove the UNIX socket at the end of the `with`."""
    try:
        yield
    finally:
        if path is not None:
            Path(path).unlink(missing_ok=True)


def _unix_socket(path: str) -> socket.socket:
    _remove_dead_socket(path)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise OSError(
            f"the UNIX socket {path} is not available: {error.strerror}; remove it, or choose another path"
        ) from None
    return listener


def _remove_dead_socket(path: str) -> None:
    """Remove the socket of a server that was killed, but not one on which a process listens."""
    with suppress(OSError):
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            return
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(path)
            except ConnectionRefusedError:
                Path(path).unlink()


def _tcp_socket(args: ServerArgs, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            args.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise OSError(f"host {args.host!r} is not an address of this machine: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        message = f"port {port} on {args.host} is not available: {error.strerror}"
        raise OSError(f"{message}; choose another with --port, 0 for a free one") from None
    return listener
