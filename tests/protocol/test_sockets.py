"""Addresses, socket files and keys: what can be bound, and the errors for what cannot."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from quire.protocol.address import (
    MAX_SOCKET_PATH,
    default_address,
    forget_server,
    ipc_path,
    is_alive,
    listed,
    listed_addresses,
    note_server,
    noted_servers,
    remove_address,
)
from quire.protocol.codec import ClientDecoder, EngineDecoder, encode
from quire.protocol.errors import AddressError, KeyFileError
from quire.protocol.keys import Security, authorized_clients, generate_keys
from quire.protocol.messages import Hello, Pong, Role
from quire.protocol.sockets import bind_engine, connect_client

Context = zmq.Context[zmq.Socket[bytes]]
TCP = "tcp://127.0.0.1:0"


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def address() -> Iterator[str]:
    address = default_address()
    yield address
    remove_address(address)


def test_a_message_goes_there_and_back(context: Context, address: str) -> None:
    engine, client = bind_engine(context, address), connect_client(context, address)
    client.send_multipart(encode(Hello(1)))
    client_id, *frames = engine.recv_multipart()
    assert EngineDecoder().decode(frames) == Hello(1)
    engine.send_multipart([client_id, *encode(Pong(0.5))])
    assert ClientDecoder().decode(client.recv_multipart()) == Pong(0.5)


def test_the_default_address_is_private_and_goes_away(context: Context, address: str) -> None:
    path = ipc_path(address)
    assert path is not None
    engine = bind_engine(context, address)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    engine.close()
    remove_address(address)
    assert not path.parent.exists()
    remove_address(address)


def test_a_folder_that_nobody_has_bound_in_is_removed_a_day_later(address: str) -> None:
    path = ipc_path(address)
    assert path is not None
    remove_address(default_address())
    assert path.parent.exists()
    os.utime(path.parent, (0, 0))
    remove_address(default_address())
    assert not path.parent.exists()


def test_a_chosen_address_is_listed_while_it_is_open(context: Context, tmp_path: Path) -> None:
    """With the servers that attach to it."""
    with listed(f"ipc://{tmp_path}/chosen.sock") as address, listed(address):
        assert address not in listed_addresses(), "nobody listens there yet"
        engine = bind_engine(context, address)
        assert listed_addresses().count(address) == 1
        assert is_alive(address)
        note_server(address, "http://127.0.0.1:8000")
        assert noted_servers(address) == ["http://127.0.0.1:8000"]
        forget_server(address)
        assert noted_servers(address) == []
        note_server(address, "http://127.0.0.1:8000")
        engine.close()
    assert address not in listed_addresses()
    assert noted_servers(address) == []


def test_an_address_that_is_not_chosen_is_a_default_one_and_tcp_stays(address: str) -> None:
    with listed(None) as made:
        assert Path(str(ipc_path(made))).parent.is_dir()
    remove_address(made)
    with listed(TCP) as given:
        assert given == TCP
    note_server(TCP, "http://127.0.0.1:8000")
    assert noted_servers(TCP) == []


def test_only_folders_of_ours_are_removed(tmp_path: Path) -> None:
    remove_address(f"ipc://{tmp_path}/s")
    assert tmp_path.exists()


def test_a_live_socket_is_not_stolen(context: Context, address: str) -> None:
    engine = bind_engine(context, address)
    with pytest.raises(AddressError, match=r"engine\.sock' is in use by another process; stop that engine, attach"):
        bind_engine(context, address)
    client = connect_client(context, address)
    client.send_multipart(encode(Hello(1)))
    assert EngineDecoder().decode(engine.recv_multipart()[1:]) == Hello(1)


def test_a_stale_socket_is_replaced(context: Context, address: str) -> None:
    path = ipc_path(address)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    engine, client = bind_engine(context, address), connect_client(context, address)
    client.send_multipart(encode(Hello(1)))
    assert EngineDecoder().decode(engine.recv_multipart()[1:]) == Hello(1)


def test_a_file_that_is_no_socket_is_left_alone(context: Context, address: str) -> None:
    path = ipc_path(address)
    assert path is not None
    path.write_text("precious")
    with pytest.raises(AddressError, match="is not a socket"):
        bind_engine(context, address)
    assert path.read_text() == "precious"
    path.unlink()


def test_no_other_user_may_ever_open_a_socket_file(context: Context, address: str) -> None:
    path, modes = ipc_path(address), list[int]()
    assert path is not None

    def bind(self: zmq.Socket[bytes], endpoint: str) -> None:
        real_bind(self, endpoint)
        modes.append(stat.S_IMODE(path.stat().st_mode))

    real_bind, mask = zmq.Socket.bind, os.umask(0)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zmq.Socket, "bind", bind)
            bind_engine(context, address)
        assert os.umask(0) == 0
    finally:
        os.umask(mask)
    assert modes == [0o600]


def test_a_tcp_port_in_use(context: Context) -> None:
    security = Security(insecure_tcp=True)
    engine = bind_engine(context, TCP, security)
    taken = engine.get_string(zmq.LAST_ENDPOINT)
    with pytest.raises(AddressError, match=f"{taken}' is in use"):
        bind_engine(context, taken, security)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("engine.sock", "must start with ipc:// or tcp://"),
        ("inproc://engine", "must start with ipc:// or tcp://"),
        ("tcp://5555", "a host and a port"),
        ("tcp://127.0.0.1:99999", "a port of 0 to 65535"),
        ("ipc://", "must name a socket file"),
        ("ipc://@abstract", "must name a socket file"),
        ("ipc://*", "must name a socket file"),
        ("ipc:///no/such/folder/engine.sock", "No such file or directory; create it first"),
        ("ipc:///tmp/" + "x" * MAX_SOCKET_PATH, f"bytes, a UNIX socket allows {MAX_SOCKET_PATH}; choose a shorter"),
        ("tcp://127.0.0.1:5555", "allow it explicitly with insecure_tcp"),
    ],
)
def test_an_address_that_cannot_be(context: Context, address: str, text: str) -> None:
    with pytest.raises(AddressError, match=text.replace("*", r"\*")):
        bind_engine(context, address)


@pytest.mark.parametrize("address", ["tcp://no.such.host.invalid:0", "tcp://203.0.113.7:0"])
def test_an_interface_that_is_not_here(context: Context, address: str) -> None:
    with pytest.raises(AddressError, match="cannot be bound"):
        bind_engine(context, address, Security(insecure_tcp=True))


def test_the_longest_path_works(context: Context, address: str) -> None:
    path = ipc_path(address)
    assert path is not None
    long = f"{path.parent}/{'x' * (MAX_SOCKET_PATH - len(str(path.parent)) - 1)}"
    engine, client = bind_engine(context, f"ipc://{long}"), connect_client(context, f"ipc://{long}")
    client.send_multipart(encode(Hello(1)))
    assert EngineDecoder().decode(engine.recv_multipart()[1:]) == Hello(1)
    remove_address(f"ipc://{long}")


def test_a_client_needs_keys_for_tcp_too(context: Context) -> None:
    with pytest.raises(AddressError, match="insecure_tcp"):
        connect_client(context, "tcp://127.0.0.1:5555")


def test_keys_and_insecurity_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="give one of them"):
        Security(tmp_path, insecure_tcp=True)


def test_keys_are_private_and_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    generate_keys(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    assert sorted(authorized_clients(folder).values()) == [Role.ADMIN, Role.CLIENT]
    with pytest.raises(KeyFileError, match="already holds"):
        generate_keys(folder)


def test_authorized_clients_may_have_comments(tmp_path: Path) -> None:
    keys = [b"0000#" * 8, zmq.curve_keypair()[0]]
    text = b"# laptop\n#\n\n" + keys[0] + b"  # no admin\n admin " + keys[1] + b" yours"
    (tmp_path / "authorized_clients").write_bytes(text)
    assert authorized_clients(tmp_path) == {keys[0]: Role.CLIENT, keys[1]: Role.ADMIN}


def test_a_word_before_a_key_is_no_role(tmp_path: Path) -> None:
    (tmp_path / "authorized_clients").write_bytes(b"root " + zmq.curve_keypair()[0])
    with pytest.raises(KeyFileError, match="authorized_clients: not a key"):
        authorized_clients(tmp_path)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda keys: (keys / "engine.secret").unlink(), "engine.secret: No such file"),
        (lambda keys: (keys / "engine.secret").write_text("short"), "not a key; a key is 40 characters"),
        (lambda keys: (keys / "engine.secret").write_text("é" * 20), "not a key; a key is 40 characters"),
        (lambda keys: (keys / "engine.secret").write_text("#" * 40), "not a key; a key is 40 characters"),
        (lambda keys: (keys / "engine.secret").chmod(0o644), "mode 0644: others can read it; run: chmod 600"),
    ],
)
def test_keys_that_cannot_be_used(context: Context, tmp_path: Path, damage: object, text: str) -> None:
    generate_keys(tmp_path / "keys")
    assert callable(damage)
    damage(tmp_path / "keys")
    with pytest.raises(KeyFileError, match=text):
        bind_engine(context, TCP, Security(tmp_path / "keys"))
