"""A flood of rubbish writes a bounded number of log lines."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from engine_process import PATIENT, DealerClient, command
from patience import PATIENCE

from quire.protocol.address import default_address, remove_address
from quire.protocol.log_limit import BURST, MESSAGES_PER_SECOND
from quire.protocol.messages import ErrorMessage, Ready

FLOOD = 5000


def test_a_flood_of_rubbish_writes_few_lines(demo_model: Path, tmp_path: Path) -> None:
    log, address = tmp_path / "log", default_address()
    flags = command(demo_model, "--engine-address", address, "--log-level", "debug", *PATIENT)
    with log.open("wb") as stderr, subprocess.Popen(flags, stdout=subprocess.PIPE, stderr=stderr) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"READY")
            with DealerClient(address) as client:
                client.first(Ready)
                for _ in range(FLOOD):
                    client.socket.send(b"rubbish")
                client.until(lambda: any(isinstance(message, ErrorMessage) for message in client.messages))
                client.request("after", max_tokens=4)
                assert len(client.tokens("after")) == 4
                assert client.wait_until_at_rest()["frames_refused"] == FLOOD
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            remove_address(address)
    lines = log.read_text().splitlines()
    rubbish = [line for line in lines if "rejected a frame of client" in line]
    reports = [line for line in rubbish if "more messages like this one were left out" in line]
    num_left_out = sum(int(line.partition("DEBUG ")[2].split()[0]) for line in reports)
    assert reports
    assert len(rubbish) - len(reports) + num_left_out == FLOOD
    assert BURST <= len(rubbish) <= BURST + PATIENCE * MESSAGES_PER_SECOND
    assert sum(map(len, lines)) < 1 << 20
