"""More connections than an engine may have open."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_process import DealerClient, EngineUnderTest, command
from patience import PATIENCE

from quire.protocol.address import default_address
from quire.protocol.keys import Security
from quire.protocol.messages import Ready

MOST_FILES = 4000  # to which the engine may raise its limit
NUM_STRANGERS = 1500
OPEN = Security(insecure_tcp=True)


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, MOST_FILES))


class LimitedEngine(EngineUnderTest):
    """An engine that may open few files."""

    def __init__(self, model: Path, address: str) -> None:
        self.address = default_address() if address == "ipc" else address
        flags = [
            "--engine-address",
            self.address,
            "--insecure-tcp",
            "--max-clients",
            "8",
            "--shutdown-timeout",
            str(PATIENCE),
        ]
        self.process = subprocess.Popen(
            command(model, *flags), stdout=subprocess.PIPE, preexec_fn=limit_files, stderr=sys.stderr
        )
        assert self.process.stdout is not None
        word, self.address = self.process.stdout.readline().decode().split()
        assert word == "READY"

    def connect(self) -> socket.socket | None:
        """A connection that says nothing; None if none is to be had."""
        rest = self.address.partition("://")[2]
        kind = socket.AF_UNIX if self.address.startswith("ipc") else socket.AF_INET
        peer = socket.socket(kind, socket.SOCK_STREAM)
        host, _, port = rest.rpartition(":")
        try:
            peer.connect(rest if kind == socket.AF_UNIX else (host, int(port)))
        except OSError:
            peer.close()
            return None
        return peer


@pytest.mark.parametrize("address", ["ipc", "tcp://127.0.0.1:0"])
def test_a_flood_of_connections_harms_nobody(demo_model: Path, address: str) -> None:
    with LimitedEngine(demo_model, address) as engine, DealerClient(engine.address, security=OPEN) as client:
        client.first(Ready)
        strangers = [peer for _ in range(NUM_STRANGERS) if (peer := engine.connect()) is not None]
        assert len(strangers) > 100
        client.request("during", max_tokens=4)
        assert len(client.tokens("during")) == 4
        deadline = time.monotonic() + PATIENCE
        while len(os.listdir(f"/proc/{engine.process.pid}/fd")) > 8 + 256 + 64:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for stranger in strangers:
            stranger.close()
        with DealerClient(engine.address, security=OPEN) as other:
            other.first(Ready)
            other.request("after", max_tokens=4)
            assert len(other.tokens("after")) == 4
        client.wait_until_at_rest()
        engine.process.terminate()
        assert engine.ended() == 0
