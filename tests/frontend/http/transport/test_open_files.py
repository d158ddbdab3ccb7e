"""The limit of open files, which bounds the connections."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from http_server import Server
from patience import PATIENCE
from quire_command import quire_command
from raw_http import RawConnection

from quire.protocol.open_files import OTHER_FILES

PING = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


def limited_python(folder: Path, num_files: int) -> str:
    """Return a command that runs Python with this limit of open files, soft and hard."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nulimit -n {num_files}\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    return str(python)


def test_a_server_with_few_files_says_so_and_serves_as_many_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_fitting = 20
    monkeypatch.setattr(sys, "executable", limited_python(tmp_path, OTHER_FILES + num_fitting))
    with Server.start() as server, ExitStack() as stack:
        replies = [server.request("/v1/chat/completions", CHAT)]
        connections = [stack.enter_context(RawConnection(server.url)) for _ in range(num_fitting)]
        replies += [connection.send(PING).reply() for connection in connections]
        assert {reply.status for reply in replies} == {200}
        assert connections[0].send(PING).reply().status == 200
        assert RawConnection(server.url).send(PING).reply().status == 503
    words = "at most 20 connections at once, of max_connections=4096: the limit of open files is 84; raise it"
    assert any(words in line for line in server.log), server.log


def test_a_server_that_could_serve_almost_none_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", limited_python(tmp_path, OTHER_FILES + 1))
    ended = subprocess.run(quire_command("serve", "--port", "0"), capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 1
    assert "the limit of open files, 65, leaves room for 1 connections; the server needs one of 80" in ended.stderr
