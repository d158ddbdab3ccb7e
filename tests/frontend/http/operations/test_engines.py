"""A server with several engines: `/engines`, `quire engines`, metrics by engine, and streams that go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from http_server import Server, events_of
from parsed_metrics import ParsedMetrics
from patience import PATIENCE
from quire_command import quire_command

from quire.frontend import LLM

ADMIN = {"x-admin-key": "boss"}
BODY = {"prompt": [300, 17, 23], "max_tokens": 8, "seed": 1, "temperature": 1.0}


@pytest.fixture(scope="module")
def several() -> Iterator[Server]:
    """A server of two engines, to which whoever reaches it may add some."""
    with Server.start("--data-parallel-size", "2", "--threads", "1", "--num-pages", "128") as server:
        yield server


@pytest.fixture
def third(demo_model: Path) -> Iterator[LLM]:
    """An engine that runs elsewhere."""
    with LLM(str(demo_model), num_pages=128, threads=1) as llm:
        yield llm


def listed(server: Server, headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
    engines: list[dict[str, Any]] = server.request("/engines", headers=headers).json()["engines"]
    return engines


def command(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = quire_command("engines", *arguments, "--url", server.url)
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_the_engines_are_listed_with_what_they_were_sent(several: Server) -> None:
    answer = several.request("/v1/completions", BODY).json()["choices"][0]["text"]
    engines = listed(several)
    assert [(each["number"], each["state"], each["supervised"]) for each in engines] == [
        (0, "ready", True), (1, "ready", True),
    ]  # fmt: skip
    assert len({each["pid"] for each in engines} | {each["address"] for each in engines}) == 4
    before = sum(sum(each["routed"].values()) for each in engines)
    assert several.request("/v1/completions", BODY).json()["choices"][0]["text"] == answer
    assert sum(sum(each["routed"].values()) for each in listed(several)) == before + 1
    assert several.request("/engines").json()["router"] == "prefix-affinity"


def test_metrics_have_the_engines_number(several: Server) -> None:
    families = ParsedMetrics(several.request("/metrics").body).families
    for name in ("engine_up", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"):
        found = {sample.labels["engine"] for sample in families[f"quire:{name}"].samples}
        assert found == {"0", "1"}, name


def final_route(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the only route in a stream, which comes with the finish reason."""
    *events, _done = events_of(server.request(path, {**body, "stream": True, "return_route": True}).body)
    [choice] = [choice for event in events for choice in event["choices"] if "route" in choice]
    assert choice["finish_reason"] == "length"
    return dict(choice["route"])


def test_an_answer_has_its_route(several: Server) -> None:
    asked = {**BODY, "return_route": True}
    route = several.request("/v1/completions", asked).json()["choices"][0]["route"]
    [hop] = route["hops"]
    assert (route["engines"], route["router"], hop["left"]) == (2, "prefix-affinity", "")
    assert hop["engine"] in (0, 1)
    assert hop["reason"] in ("load", "prefix")
    assert len(final_route(several, "/v1/completions", BODY)["hops"]) == 1
    chat = {"messages": [{"role": "user", "content": "a fox"}], "max_tokens": 8, "ignore_eos": True}
    choices = several.request("/v1/chat/completions", {**chat, "return_route": True, "n": 2}).json()["choices"]
    assert [len(choice["route"]["hops"]) for choice in choices] == [1, 1]
    assert final_route(several, "/v1/chat/completions", chat)["engines"] == 2
    assert "route" not in several.request("/v1/completions", BODY).json()["choices"][0]


def test_a_route_tells_of_the_engine_that_was_lost() -> None:
    """The engine has nothing of the request yet when it is killed, since both are stopped."""
    with Server.start("--data-parallel-size", "2", "--threads", "1", "--num-pages", "128") as server:
        pids = {engine["number"]: engine["pid"] for engine in listed(server)}
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(server.request, "/v1/completions", {**BODY, "return_route": True})
            while not (busy := [engine["number"] for engine in listed(server) if engine["requests"]]):
                assert not answer.done()
            for number, pid in pids.items():
                os.kill(pid, signal.SIGKILL if number == busy[0] else signal.SIGCONT)
            hops = answer.result().json()["choices"][0]["route"]["hops"]
        assert [hop["left"] for hop in hops] == ["lost"] * (len(hops) - 1) + [""]
        assert (hops[0]["engine"], len(hops) > 1) == (busy[0], True)
        while any(engine["state"] != "ready" for engine in listed(server)):
            assert server.process.poll() is None


def test_engines_join_and_leave_by_command(several: Server, third: LLM) -> None:
    done = command(several, "add", third.engine_address)
    assert (done.returncode, done.stderr) == (0, "")
    number = listed(several)[-1]["number"]
    assert listed(several)[-1] | {"address": third.engine_address, "supervised": False} == listed(several)[-1]
    assert command(several, "drain", str(number)).returncode == 0
    assert listed(several)[-1]["state"] == "draining"
    assert f"{number}  draining" in command(several, "list").stdout
    assert command(several, "remove", str(number), "--drain-timeout", "1").returncode == 0
    assert [each["number"] for each in json.loads(command(several, "list", "--json").stdout)["engines"]] == [0, 1]
    gone = command(several, "remove", str(number))
    assert (gone.returncode, gone.stdout) == (1, "")
    assert f"there is no engine '{number}'; the engines are 0, 1" in gone.stderr


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/engines", {"address": "nowhere"}, 400, "must start with ipc:// or tcp://"),
        ("/engines", {"address": "ipc:///nowhere.sock"}, 400, "no engine listens at"),
        ("/engines", {"address": 5}, 400, "address"),
        ("/engines", {}, 400, "address"),
        ("/engines", {"address": "x" * 5000}, 400, "address"),
        ("/engines/9/drain", {}, 404, "there is no engine '9'; the engines are 0, 1"),
        ("/engines/-1/remove", {}, 404, "there is no engine '-1'"),
        ("/engines/0/remove", {"drain_timeout": -1}, 400, "drain_timeout"),
        ("/engines/0/remove", {"drain_timeout": 1e99}, 400, "drain_timeout"),
    ],
)
def test_what_cannot_be_is_refused(several: Server, path: str, body: object, status: int, message: str) -> None:
    reply = several.request(path, body)
    assert (reply.status, message in reply.error["message"]) == (status, True), reply.body
    assert [each["state"] for each in listed(several)] == ["ready", "ready"]


def test_the_last_engine_stays(server: Server) -> None:
    reply = server.request("/engines/0/remove", {})
    assert reply.status == 409
    assert reply.error["message"] == "engine 0 is the last one that takes requests; add another one first"
    assert listed(server)[0]["state"] == "ready"


def test_with_api_keys_an_admin_key_is_needed(tmp_path: Path) -> None:
    keys = tmp_path / "admin"
    keys.write_text("# of administrators\n\nboss\n")
    bearer = {"Authorization": "Bearer user"}
    with Server.start("--api-key", "user", "--admin-key-file", str(keys), "--num-pages", "64") as server:
        assert len(listed(server, bearer)) == 1
        for path, body in (
            ("/engines", {"address": "ipc:///nowhere.sock"}), ("/engines/0/drain", {}), ("/engines/0/remove", {}),
        ):  # fmt: skip
            reply = server.request(path, body, headers=bearer)
            assert (reply.status, reply.error["code"]) == (403, "admin_key_needed")
        reply = server.request("/engines", {"address": "ipc:///nowhere.sock"}, headers=bearer | ADMIN)
        assert (reply.status, "no engine listens" in reply.error["message"]) == (400, True)
        assert command(server, "list").returncode == 1
        assert "0  ready" in command(server, "list", "--admin-key-file", str(keys)).stdout
        refused = command(server, "drain", "0", "--admin-key-file", str(keys))
        assert "engine 0 is the last one that takes requests" in refused.stderr
        for what in ("load", "unload"):
            body = {"model": server.model}
            assert server.request(f"/models/{what}", body, headers=bearer).error["code"] == "admin_key_needed"
            assert server.request(f"/models/{what}", body, headers=ADMIN).status == 400  # the model stays loaded
        assert server.request("/v1/models", headers=ADMIN).status == 200  # which lists the adapters
        for path in ("/v1/modelsx", "/enginesx", "/v1/completions"):
            assert server.request(path, headers=ADMIN).status == 401
