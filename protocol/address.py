"""Addresses of engines: `ipc:///path/of/socket` or `tcp://host:port`.

A socket file whose engine is gone is replaced. One with a live engine behind it never is: libzmq would silently unlink
it, and no client could reach that engine any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from quire.protocol.errors import AddressError

MAX_SOCKET_PATH = 103 if sys.platform == "darwin" else 107
"""Length of a UNIX socket's path in bytes: `sun_path` without its closing zero."""

_FOLDER_PREFIX = "quire-"
_SERVER_PREFIX = "http-"  # of a file with the URL of a server, and its process id
_SOCKET = "engine.sock"
_LOCK_SECONDS = 5.0
_ABANDONED_SECONDS = 86400.0  # of a folder without a socket: no engine loads as long


def default_address() -> str:
    """Return the `ipc://` path of a socket in a fresh private (0700) folder; `remove_address` removes both.

    Remove those folders that others have left when they were killed before there was a socket in them.
    """
    for folder in Path(_base()).glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # it has a socket, or is another user's
            if folder.stat().st_mtime < time.time() - _ABANDONED_SECONDS:
                folder.rmdir()
    return f"ipc://{tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=_base())}/{_SOCKET}"


@contextlib.contextmanager
def listed(address: str | None) -> Iterator[str]:
    """Have `listed_addresses` name an `ipc://` address that a user has chosen, by a link in a private folder.

    Yield the address, without one a default address, which is listed anyway. Raises AddressError.
    """
    path = None if address is None else ipc_path(address)
    if path is None:
        yield address or default_address()
        return
    private = default_address()
    try:
        Path(private.removeprefix("ipc://")).symlink_to(path)
        yield f"ipc://{path}"
    finally:
        remove_address(private)


def remove_orphaned(address: str) -> None:
    """Remove an `ipc://` address, and the links that list it, for an owner who was killed."""
    links = [path for path in _sockets() if path.is_symlink() and f"ipc://{path.readlink()}" == address]
    for path in (address, *(f"ipc://{link}" for link in links)):
        remove_address(path)


def listed_addresses() -> list[str]:
    """Return the addresses of sockets that this user may open: of `default_address` and `listed`, alive or not."""
    paths = {path.readlink() if path.is_symlink() else path for path in _sockets() if os.access(path, os.W_OK)}
    return [f"ipc://{path}" for path in sorted(paths)]


def _sockets() -> list[Path]:
    return sorted(Path(_base()).glob(f"{_FOLDER_PREFIX}*/{_SOCKET}"))


def _base() -> str:
    base = tempfile.gettempdir()
    is_short = len(os.fsencode(base)) + 40 <= MAX_SOCKET_PATH
    return base if is_short else "/tmp"  # noqa: S108 - mkdtemp makes the folder private


def is_alive(address: str) -> bool:
    """Return True if a process listens at an `ipc://` address."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(ipc_path(address) or ""))
        except OSError:
            return False
    return True


def remove_address(address: str) -> None:
    """Remove the socket file of an `ipc://` address, and its folder if `default_address` made it.

    For an engine that stops, and for a launcher whose engine was killed. Files that are already gone are no error.
    """
    path = ipc_path(address)
    if path is None:
        return
    path.unlink(missing_ok=True)
    if path.parent.name.startswith(_FOLDER_PREFIX):
        for note in path.parent.glob(f"{_SERVER_PREFIX}*"):  # of a server that was killed
            note.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty, or already gone
            path.parent.rmdir()


def note_server(address: str, url: str) -> None:
    """Note that this process serves the engine at `address` by HTTP; without effect if that is not listed."""
    if (note := _note(address)) is not None:
        with contextlib.suppress(OSError):  # the engine has gone, or is another user's
            note.write_text(url, encoding="utf-8")


def forget_server(address: str) -> None:
    """Remove the note of this process, if there is one."""
    if (note := _note(address)) is not None:
        note.unlink(missing_ok=True)


def noted_servers(address: str) -> list[str]:
    """Return the URLs of the servers that are noted for the engine at `address`, and whose processes are alive."""
    note = _note(address)
    found = [] if note is None else sorted(note.parent.glob(f"{_SERVER_PREFIX}*"))
    return [path.read_text(encoding="utf-8") for path in found if Path("/proc", path.name.rpartition("-")[2]).exists()]


def _note(address: str) -> Path | None:
    """Return the file for the note of this process; None for an address that is not listed."""
    path = ipc_path(address)
    if path is None:
        return None
    links = (each for each in _sockets() if each.is_symlink() and each.readlink() == path)
    socket_or_link = path if path.parent.name.startswith(_FOLDER_PREFIX) else next(links, None)
    return None if socket_or_link is None else socket_or_link.parent / f"{_SERVER_PREFIX}{os.getpid()}"


def ipc_path(address: str) -> Path | None:
    """Return the absolute socket path of an `ipc://` address, None for `tcp://`. Raises AddressError otherwise."""
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in ("ipc", "tcp"):
        raise AddressError(f"address {address!r}: must start with ipc:// or tcp://, as in ipc:///run/quire/engine.sock")
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if not host or not (port == "*" or (port.isdecimal() and int(port) < 65536)):  # libzmq would read 65537 as 1
            raise AddressError(
                f"address {address!r}: a tcp address has a host and a port of 0 to 65535, as in tcp://127.0.0.1:5555"
            )
        return None
    if not rest or rest[0] in "@*":
        raise AddressError(
            f"address {address!r}: must name a socket file, whose permissions protect it; "
            "leave the address out to get one in a private folder"
        )
    path = Path(rest).absolute()
    if (length := len(os.fsencode(path))) > MAX_SOCKET_PATH:
        raise AddressError(
            f"address {address!r}: the socket path has {length} bytes, a UNIX socket allows {MAX_SOCKET_PATH}; "
            "choose a shorter path, as in /tmp"
        )
    return path


def in_use(address: str) -> AddressError:
    """Return the error for an address that another process listens on."""
    return AddressError(
        f"address {address!r} is in use by another process; stop that engine, attach to it as a client, "
        "or choose another address"
    )


@contextlib.contextmanager
def claim_path(address: str, path: Path) -> Iterator[None]:
    """Make `path` free to bind in the body of the `with`, and remove a stale socket file. Raises AddressError.

    The folder is locked meanwhile, so that of two engines that start at once neither takes the other's fresh socket for
    a stale one.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise AddressError(f"address {address!r}: folder {path.parent}: {error.strerror}; create it first") from error
    try:
        _lock(folder, address)
        _remove_stale(address, path)
        yield
    finally:
        os.close(folder)


def _lock(folder: int, address: str) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise AddressError(
                    f"address {address!r}: another process has held the lock of its folder for {_LOCK_SECONDS:g} s; "
                    "choose another folder"
                ) from None
            time.sleep(0.02)


def _remove_stale(address: str, path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AddressError(f"address {address!r}: {path} exists and is not a socket; remove it or choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except OSError as error:  # full backlog or no permission: its owner may be alive
            raise in_use(address) from error
    raise in_use(address)
