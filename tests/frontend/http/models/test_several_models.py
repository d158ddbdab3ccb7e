"""Several models behind one server: one at a time, and side by side."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from engine_watch import halted, wait_until
from gguf_files import write_gguf
from http_server import Reply, Server, events_of
from ollama import Client
from patience import PATIENCE
from raw_http import RawConnection

from quire.frontend.client.engine_client import CoreClient

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ENGINE = ("--num-pages", "64", "--no-preload-grammars")


@pytest.fixture(scope="module")
def shelf(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models tales, fables and broken; the last has no weights."""
    folder = tmp_path_factory.mktemp("shelf")
    for name in ("tales", "fables", "broken"):
        (folder / name).mkdir()
        for file in demo_model.iterdir():
            if file.is_file() and not (name == "broken" and file.suffix == ".safetensors"):
                (folder / name / file.name).symlink_to(file)
    return folder


@pytest.fixture(scope="module")
def one_at_a_time(shelf: Path) -> Iterator[Server]:
    """Serve all of them, of which one is loaded at once."""
    models = [str(shelf / name) for name in ("tales", "fables", "broken")]
    with Server.start(*models, "--max-loaded", "1", *ENGINE) as server:
        assert server.model == "tales, fables, broken"
        yield server


@pytest.fixture(scope="module")
def side_by_side(shelf: Path) -> Iterator[Server]:
    """Serve all of them, as many at once as fit."""
    with Server.start("--models-dir", str(shelf), *ENGINE) as server:
        assert server.model == "broken, fables, tales"
        yield server


def complete(server: Server, model: str | None, headers: dict[str, str] | None = None) -> Reply:
    body = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return server.request("/v1/completions", body if model is None else {**body, "model": model}, headers=headers)


def states(server: Server) -> dict[str, str]:
    return {card["id"]: card["status"]["value"] for card in server.request("/v1/models").json()["data"]}


def engine_of(server: Server, model: str) -> int:
    """The process of the engine of a loaded model."""
    address = next(line for line in reversed(server.log) if f"loaded {model} in" in line).split()[-1]
    client = CoreClient(address, lambda _: None)
    try:
        return client.ready.engine_pid
    finally:
        client.close()


def stream(server: Server, model: str, max_tokens: int) -> tuple[RawConnection, Any]:
    """Begin a stream, and return once its first token is there."""
    body = json.dumps({"model": model, "prompt": "Once", "max_tokens": max_tokens, "stream": True, "ignore_eos": True})
    head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Connection: close"]
    connection = RawConnection(server.url)
    connection.send("\r\n".join([*head, f"Content-Length: {len(body)}", "", body]).encode())
    response = connection.begin_reply()
    assert response.status == 200
    assert response.read(1)
    return connection, response


def test_a_request_goes_to_the_model_that_it_names_and_without_a_name_to_the_first(one_at_a_time: Server) -> None:
    server = one_at_a_time
    texts = []
    for name, answered in ((None, "tales"), ("fables:latest", "fables")):
        reply = complete(server, name)
        assert (reply.status, reply.json()["model"]) == (200, answered)
        texts.append(reply.json()["choices"][0]["text"])
        assert [each for each, state in states(server).items() if state == "loaded"] == [answered]
    assert len(set(texts)) == 1, "they are the same model"
    unknown = complete(server, "poems")
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
    assert "tales, fables, broken" in unknown.error["message"]
    assert server.request("/api/show", {"model": "poems"}).status == 404
    assert server.request("/tokenizer_info?model=fables").status == 200
    for path in ("/tokenizer_info", "/slots", "/engines", "/server_info", "/props"):
        assert server.request(f"{path}?model=broken").error["code"] == "model_not_loaded"
    assert server.request("/props?model=poems").status == 404


def test_a_model_that_can_not_be_loaded_fails_its_own_requests_alone(one_at_a_time: Server) -> None:
    server = one_at_a_time
    assert complete(server, "tales").status == 200
    reply = complete(server, "broken")
    assert (reply.status, reply.error["code"]) == (503, "model_not_loaded")
    assert "model.safetensors" in reply.error["message"]
    assert int(reply.headers["retry-after"]) >= 1
    assert states(server)["tales"] == "loaded", "it made no room"
    card = server.request("/v1/models/broken").json()
    assert (card["status"], card["max_model_len"]) == ({"value": "unloaded", "failed": True}, None)
    assert server.request("/health").status == 200
    listed = server.request("/api/tags").json()["models"]
    assert {model["name"]: model["size"] > 0 for model in listed} == {
        "tales:latest": True, "fables:latest": True, "broken:latest": False,
    }  # fmt: skip


def test_a_model_is_not_unloaded_under_a_stream(one_at_a_time: Server) -> None:
    server = one_at_a_time
    assert complete(server, "tales").status == 200
    connection, response = stream(server, "tales", 40)
    with connection:
        with halted(engine_of(server, "tales")):
            late = complete(server, "fables", {"X-Request-Timeout": "0.2"})
            assert (late.status, late.error["code"]) == (504, "deadline_exceeded")
            assert "fables" in late.error["message"]
            assert states(server)["tales"] == "loaded"
        waiting = threading.Thread(target=complete, args=(server, "fables"))
        waiting.start()
        events = events_of(b"d" + response.read())
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    waiting.join()
    assert states(server) == {"tales": "unloaded", "fables": "loaded", "broken": "unloaded"}


def test_keep_alive_says_when_a_model_is_unloaded(one_at_a_time: Server) -> None:
    server, client = one_at_a_time, Client(one_at_a_time.url)
    client.generate("tales", "Once", options={"num_predict": 2}, keep_alive="5m")
    [loaded] = client.ps().models
    assert (loaded.model, loaded.context_length) == ("tales:latest", 2048)
    assert loaded.expires_at is not None
    assert 280 < (loaded.expires_at - datetime.now(UTC)).total_seconds() <= 301
    client.generate("tales", "Once", options={"num_predict": 2}, keep_alive=-1)
    [loaded] = client.ps().models
    assert loaded.expires_at is not None
    assert loaded.expires_at.year > 2300
    client.generate("tales", "Once", options={"num_predict": 2}, keep_alive=0)
    wait_until(lambda: not client.ps().models, "the model was not unloaded")
    empty = client.generate("tales", keep_alive="0s")
    assert (empty.done_reason, client.ps().models) == ("unload", [])
    assert client.chat("fables").done_reason == "load"
    assert [model.model for model in client.ps().models] == ["fables:latest"]
    shown = client.show("fables")
    assert shown.capabilities == ["completion", "tools"]
    assert client.generate("fables", keep_alive=0).done_reason == "unload"
    wait_until(lambda: states(server)["fables"] == "unloaded", "the model was not unloaded")


def test_llama_cpps_endpoints_load_and_unload(one_at_a_time: Server) -> None:
    server = one_at_a_time

    def ask(what: str, model: str | None) -> tuple[int, Any]:
        reply = server.request(f"/models/{what}", {"model": model})
        return reply.status, reply.json() if reply.status == 200 else reply.error["param"]

    complete(server, "fables")
    assert ask("load", "tales") == (200, {"success": True})
    wait_until(lambda: states(server)["tales"] == "loaded", "the model was not loaded")
    assert ask("load", "tales") == (400, "model")
    assert ask("load", None) == (400, "model")
    assert ask("load", "poems") == (404, "model")
    before = server.request("/props?model=tales").json()
    assert (before["model_alias"], before["is_sleeping"]) == ("tales", False)
    assert ask("unload", "tales") == (200, {"success": True})
    wait_until(lambda: states(server)["tales"] == "unloaded", "the model was not unloaded")
    assert ask("unload", "tales") == (400, "model")
    assert server.request("/props?model=tales").json() == {**before, "is_sleeping": True}
    assert states(server)["tales"] == "unloaded", "to look at it does not load it"


def test_an_engine_that_is_killed_disturbs_no_other_model(side_by_side: Server) -> None:
    server = side_by_side
    for name in ("tales", "fables"):
        assert complete(server, name).status == 200
    connection, response = stream(server, "tales", 60)
    with connection:
        os.kill(engine_of(server, "fables"), signal.SIGKILL)
        assert complete(server, "fables").status in (200, 503)
        events = events_of(b"d" + response.read())
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert complete(server, "fables").status == 200
    assert states(server) == {"broken": "unloaded", "fables": "loaded", "tales": "loaded"}


def test_metrics_and_documents_have_all_models(side_by_side: Server) -> None:
    server = side_by_side
    complete(server, "tales")
    page = server.request("/metrics").body.decode()
    assert page.count("# TYPE quire:engine_up gauge") == 1
    assert 'quire:engine_up{engine="0",model_name="tales"} 1.0' in page
    assert 'quire:engine_sleep_state{engine="0",model_name="broken",sleep_state="discard_all"} 1.0' in page
    assert server.request("/load").json() == {"server_load": 0}
    document = server.request("/openapi.json").json()
    assert document["components"]["schemas"]["ChatBody"]["properties"]["model"]["enum"] == [
        "broken", "fables", "tales", None,
    ]  # fmt: skip
    assert "`broken`, `fables`, `tales`" in document["info"]["description"]


def test_a_view_shows_its_model_and_loads_none(side_by_side: Server) -> None:
    server = side_by_side
    complete(server, "tales")
    for model, first in (("tales", "history"), ("broken", "problem")):
        with RawConnection(server.url) as connection:
            connection.send(f"GET /view/events?model={model} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            line = connection.begin_reply().readline().decode()
            assert line == f"event: {first}\n"
    assert server.request("/view/prefixes?model=broken").error["code"] == "model_not_loaded"
    assert server.request("/view/prefixes?model=tales").status == 200
    assert states(server)["broken"] == "unloaded"


def test_the_page_has_a_list_of_the_models(browser: Browser, side_by_side: Server) -> None:
    complete(side_by_side, "fables")
    with browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(PATIENCE * 1000)
        page.goto(side_by_side.url)
        page.wait_for_function("() => document.querySelector('#model').textContent")
        assert page.locator("#models option").all_inner_texts() == ["broken", "fables", "tales"]
        assert states(side_by_side)[page.input_value("#models")] == "loaded"
        page.select_option("#models", "tales")
        page.fill("#input", "Tell me a tale.")
        with page.expect_request("**/v1/chat/completions") as sent:
            page.keyboard.press("Enter")
        body: Any = sent.value.post_data_json
        assert body["model"] == "tales"
        page.evaluate("document.querySelector('#toggle-engine').click()")
        page.wait_for_function("() => document.querySelector('#engine-note').hidden")
        page.select_option("#models", "broken")
        page.wait_for_selector("#engine-note:text('broken is not loaded')")


def test_a_folder_has_checkpoints_and_gguf_files_and_signals_end_all(
    shelf: Path, demo_model: Path, tmp_path: Path
) -> None:
    write_gguf(demo_model, tmp_path / "verses.gguf", "BF16")
    (tmp_path / "tales").symlink_to(shelf / "tales")
    (tmp_path / "notes").mkdir()
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with Server.start(str(shelf / "fables"), "--models-dir", str(tmp_path), *ENGINE, environment=cache) as server:
        assert server.model == "fables, tales, verses"
        for name in ("verses", "fables"):
            assert complete(server, name).json()["model"] == name
        [listed] = [each for each in server.request("/api/tags").json()["models"] if each["name"] == "verses:latest"]
        assert listed["details"]["format"] == "gguf"
        assert server.request("/models/load", {"model": "tales"}).status == 200
        server.check_pages()
        assert server.stop(signal.SIGINT) == 130
    assert not list(tmp_path.rglob("*.sock"))
