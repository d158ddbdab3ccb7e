"""Access over tcp: CURVE keys (curve25519) in files, as ssh has them, and the gate that lets clients in.

A keys folder holds `engine.secret` and `engine.public`, `client.secret`, `admin.secret`, and `authorized_clients`: the
public keys that the engine lets in, one a line, with the word `admin` before an administrator's; what follows a key,
and a line that starts with `#`, is a comment. A client on another host needs `engine.public`, and `client.secret` or
`admin.secret`.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from quire.protocol.errors import KeyFileError
from quire.protocol.messages import Role

_KEY_CHARACTERS = 40  # 32 bytes in Z85
_ADMIN = b"admin"  # before a key in authorized_clients
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


@dataclass(frozen=True)
class Security:
    """Protection of `tcp://`. `ipc://` is protected by the permissions of its file, and by keys as well if given.

    `keys`: folder made by `generate_keys`. `insecure_tcp`: allow tcp without keys, for anyone who reaches the port.
    """

    keys: Path | None = None
    insecure_tcp: bool = False

    def __post_init__(self) -> None:
        if self.keys is not None and self.insecure_tcp:
            raise KeyFileError(f"keys {self.keys} and insecure_tcp were both given; give one of them")


NO_KEYS = Security()
"""The default: only `ipc://`."""


def generate_keys(folder: Path) -> None:
    """Write key pairs for an engine and its clients into `folder` (made 0700 if absent, files 0600).

    Raises KeyFileError if there are keys already: they may be in use.
    """
    engine_public, engine_secret = zmq.curve_keypair()
    client_public, client_secret = _client_keypair()
    admin_public, admin_secret = _client_keypair()
    contents = {
        "engine.secret": engine_secret,
        "engine.public": engine_public,
        "client.secret": client_secret,
        "admin.secret": admin_secret,
        "authorized_clients": b"%s %s\n%s" % (_ADMIN, admin_public, client_public),
    }
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if present := [name for name in contents if (folder / name).exists()]:
        raise KeyFileError(f"keys folder {folder} already holds {', '.join(present)}; choose another folder")
    for name, key in contents.items():
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "wb") as out:
            out.write(key + b"\n")


def _client_keypair() -> tuple[bytes, bytes]:
    """Return a key pair whose public key is not a comment in authorized_clients."""
    while (pair := zmq.curve_keypair())[0].startswith(b"#"):
        pass
    return pair


def secure_engine(socket: zmq.Socket[bytes], folder: Path) -> None:
    """Make `socket` the CURVE server of `folder`; the gate checks every client. Raises KeyFileError."""
    socket.curve_secretkey = _read_secret(folder / "engine.secret")
    socket.curve_server = True
    socket.zap_domain = b"quire"
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a gate libzmq would let every key in


def secure_client(socket: zmq.Socket[bytes], folder: Path) -> None:
    """Make `socket` a CURVE client with the keys of `folder`: admin.secret, if it is there. Raises KeyFileError."""
    names = ("admin.secret", "client.secret")
    secret = _read_secret(next((folder / name for name in names if (folder / name).is_file()), folder / names[1]))
    socket.curve_serverkey = _read_key(folder / "engine.public")
    socket.curve_secretkey = secret
    socket.curve_publickey = zmq.curve_public(secret)


def authorized_clients(folder: Path) -> dict[bytes, Role]:
    """Return the public keys that an engine with the keys of `folder` lets in, and their roles. Raises KeyFileError."""
    path, roles = folder / "authorized_clients", {}
    for words in (line.split() for line in _read(path).splitlines()):
        if words and not words[0].startswith(b"#"):
            is_admin = words[0] == _ADMIN and len(words) > 1
            roles[_check_key(path, words[is_admin])] = Role.ADMIN if is_admin else Role.CLIENT
    return roles


def _read_secret(path: Path) -> bytes:
    key = _read_key(path)
    if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
        raise KeyFileError(f"key file {path} has mode {mode:04o}: others can read it; run: chmod 600 {path}")
    return key


def _read_key(path: Path) -> bytes:
    return _check_key(path, _read(path).strip())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise KeyFileError(
            f"key file {path}: {error.strerror}; make a keys folder with quire.protocol.keys.generate_keys"
        ) from error


def _check_key(path: Path, key: bytes) -> bytes:
    try:
        if len(key) == _KEY_CHARACTERS and len(z85.decode(key)) == 32:
            return key
    except (KeyError, ValueError, struct.error):
        pass
    raise KeyFileError(f"key file {path}: not a key; a key is {_KEY_CHARACTERS} characters of Z85, this has {len(key)}")


class Gate:
    """Answers to libzmq which CURVE keys it may let into a context (ZAP, rfc.zeromq.org/spec/27), on the IO thread.

    Make it before the socket that it guards is bound. pyzmq's authenticators do the same on a thread or an event loop
    of their own; here one more socket in the poller is enough.
    """

    def __init__(self, context: zmq.Context[Any], roles: Mapping[bytes, Role]) -> None:
        """Bind the gate's socket; `roles`: those of the public keys, in Z85, that may enter."""
        self._roles = {z85.decode(key): role for key, role in roles.items()}
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ENDPOINT)
        self.num_rejected = 0

    def answer(self) -> None:
        """Answer the next question; call it when `socket` is readable."""
        version, request_id, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        key = credentials[0] if mechanism == b"CURVE" else b""
        if key in self._roles:
            answer = [b"200", b"OK", z85.encode(key), b""]  # the key comes with each message, as its User-Id
        else:
            self.num_rejected += 1
            answer = [b"400", b"this key is not in authorized_clients", b"", b""]
        self.socket.send_multipart([version, request_id, *answer])

    def identify(self, frame: zmq.Frame) -> tuple[str, Role]:
        """Return the key, in Z85, of the client that sent a frame, and its role."""
        key = str(frame.get("User-Id"))
        return key, self._roles[z85.decode(key)]

    def close(self) -> None:
        """Close the socket; from now on no client is let in."""
        self.socket.close()
