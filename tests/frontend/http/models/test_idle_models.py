"""A model that sleeps when it is idle, behind a server of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_watch import wait_until
from http_server import Server


@pytest.fixture(scope="module")
def sleepy(demo_model: Path) -> Iterator[Server]:
    """Serve a model that sleeps after a tenth of a second."""
    with Server.start(str(demo_model), "--idle-timeout", "0.1", "--num-pages", "64") as server:
        yield server


def state(server: Server) -> str:
    return str(server.request("/v1/models").json()["data"][0]["status"]["value"])


def wait_for_sleep(server: Server) -> None:
    wait_until(lambda: state(server) == "sleeping", "the model does not sleep")


def test_a_model_that_sleeps_has_no_process_and_a_request_wakes_it(sleepy: Server) -> None:
    server = sleepy
    body: Any = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    before = server.request("/v1/completions", body).json()["choices"]
    wait_for_sleep(server)
    assert server.engine_addresses == []
    tasks = Path(f"/proc/{server.process.pid}/task").iterdir()
    assert not [pid for task in tasks for pid in (task / "children").read_text().split() if is_engine(pid)]
    assert server.request("/v1/completions", body).json()["choices"] == before


def test_engines_that_share_their_weights_leave_none_in_memory_when_the_model_sleeps(demo_model: Path) -> None:
    options = ("--idle-timeout", "0.1", "--data-parallel-size", "2", "--threads", "1", "--num-pages", "64")
    with Server.start(str(demo_model), *options) as server:
        for _ in range(2):  # also for the engines that a request has started
            wait_for_sleep(server)
            assert memory_files(server) == []
            assert server.request("/v1/completions", {"prompt": "Once", "max_tokens": 1}).status == 200


def memory_files(server: Server) -> list[str]:
    """Return the memory files that a server shares with its engines."""
    found = [str(file.readlink()) for file in Path(f"/proc/{server.process.pid}/fd").iterdir() if file.is_symlink()]
    return [name for name in found if name.startswith("/memfd:quire")]


def test_an_engine_that_would_be_forgotten_is_not_added(sleepy: Server) -> None:
    refused = sleepy.request("/engines", {"address": "ipc:///nowhere.sock"})
    assert (refused.status, "--idle-timeout" in refused.error["message"]) == (400, True)


def test_a_server_is_not_healthy_whose_model_can_not_be_loaded_again(demo_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(demo_model, tmp_path / "model")
    with Server.start(str(folder), "--idle-timeout", "0.1", "--num-pages", "64") as server:
        wait_for_sleep(server)
        assert server.request("/health").status == 200
        (folder / "config.json").write_text("{}")
        assert server.request("/v1/completions", {"prompt": "Once"}).error["code"] == "model_not_loaded"
        assert server.request("/health").error["code"] == "model_not_loaded"


def is_engine(pid: str) -> bool:
    try:
        return b"quire.engine_core" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False


def test_what_looks_at_a_sleeping_model_does_not_wake_it(sleepy: Server) -> None:
    server = sleepy
    server.request("/props")
    wait_for_sleep(server)
    assert server.request("/health").status == server.request("/ready").status == 200
    assert server.request("/load").json() == {"server_load": 0}
    page = server.request("/metrics").body.decode()
    assert 'sleep_state="awake"} 0.0' in page
    assert "engine_up" not in page
    assert "quire:prompt_tokens_total" in page
    assert server.request("/api/ps").json() == {"models": []}
    assert server.request("/api/show", {}).json()["capabilities"] == ["completion", "tools"]
    assert server.request("/props").json()["is_sleeping"] is True
    [card] = server.request("/v1/models").json()["data"]
    assert (card["max_model_len"], card["status"]) == (2048, {"value": "sleeping"})


def test_a_model_without_the_option_stays_loaded_whatever_its_clients_say(server: Server) -> None:
    body = {"prompt": "Once", "options": {"num_predict": 1}, "stream": False}
    assert server.request("/api/generate", {**body, "keep_alive": 0}).status == 200
    assert server.request("/api/generate", {"keep_alive": 0}).json()["done_reason"] == "load"
    for long in (10**310, "9" * 64):
        assert server.request("/api/generate", {"keep_alive": long}).status == 200
    refused = server.request("/models/unload", {"model": server.model})
    assert (refused.status, "--idle-timeout" in refused.error["message"]) == (400, True)
    assert server.request("/models/load", {"model": server.model}).status == 400
    assert state(server) == "loaded"
    os.kill(server.engine_pid, 0)
