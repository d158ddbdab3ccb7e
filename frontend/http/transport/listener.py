"""The socket that the server listens at."""

from __future__ import annotations

import resource
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quire.frontend.http.args import ServerArgs

_OTHER_FILES = 128  # sockets of the engine, files of the model, and what comes and goes


def bind(args: ServerArgs, port: int) -> socket.socket:
    """The socket that `args` asks for, at this port. Raises `OSError` that says what to do."""
    return _tcp_socket(args, port) if args.uds is None else _unix_socket(args.uds)


@contextmanager
def removed(path: str | None) -> Iterator[None]:
    """Remove a UNIX socket at the end of the `with`."""
    try:
        yield
    finally:
        if path is not None:
            Path(path).unlink(missing_ok=True)


def allow_connections(count: int) -> int:
    """Raise the process's limit of open files so that `count` connections fit; returns how many of them do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return count
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(1, most - _OTHER_FILES)


def _unix_socket(path: str) -> socket.socket:
    _remove_dead_socket(path)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise OSError(f"the UNIX socket {path} can't be had: {error.strerror}; remove it, or name another") from None
    return listener


def _remove_dead_socket(path: str) -> None:
    """Remove what a server left that was killed; one that somebody listens at stays."""
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
        raise OSError(
            f"port {port} on {args.host} can't be had: {error.strerror}; choose another with --port, 0 for a free one"
        ) from None
    return listener
