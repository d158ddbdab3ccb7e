"""Ollama's endpoints about models, its errors, and the checks that all endpoints share."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from http.client import HTTPResponse
from typing import Any, cast

import pytest
from http_server import Server, folder_of_demo_model
from ollama import Client, ResponseError
from patience import PATIENCE

MODEL = "quire-demo"
TALE: Any = [{"role": "user", "content": "Tell me a tale"}]
SHORT: Any = {"messages": TALE, "options": {"num_predict": 1}, "stream": False}


@pytest.fixture(scope="module")
def ollama(server: Server) -> Client:
    return Client(host=server.url)


def test_the_model_is_listed_under_its_name_with_a_tag(ollama: Client, server: Server) -> None:
    [model] = ollama.list().models
    assert model.model == "quire-demo:latest"
    weights = sum(file.stat().st_size for file in folder_of_demo_model().glob("*.safetensors"))
    assert model.size == weights > 0
    assert model.details is not None
    assert (model.details.format, model.details.family) == ("safetensors", "qwen3")
    [listed] = server.request("/api/tags").json()["models"]
    assert listed["name"] == listed["model"]
    assert len(bytes.fromhex(listed["digest"])) == 32
    assert ollama.chat(listed["name"], TALE, options={"num_predict": 1}).done


def test_the_running_model_stays(ollama: Client) -> None:
    [model] = ollama.ps().models
    [listed] = ollama.list().models
    assert (model.name, model.digest, model.context_length) == ("quire-demo:latest", listed.digest, 2048)
    assert model.expires_at is not None
    assert model.expires_at.year > 2300


def test_a_model_is_described(ollama: Client, server: Server) -> None:
    shown = ollama.show(MODEL)
    assert shown.modelinfo is not None
    family = shown.modelinfo["general.architecture"]
    assert (family, shown.modelinfo[f"{family}.context_length"]) == ("qwen3", 2048)
    assert shown.capabilities == ["completion", "tools"]
    assert shown.template == json.loads((folder_of_demo_model() / "tokenizer_config.json").read_text())["chat_template"]
    for body in ({"name": MODEL}, {"model": f"{MODEL}:latest", "verbose": False}, {}):
        assert server.request("/api/show", body).json()["details"]["family"] == "qwen3"
    with pytest.raises(ResponseError, match='model "other" not found') as refused:
        ollama.show("other")
    assert refused.value.status_code == 404
    verbose = server.request("/api/show", {"model": MODEL, "verbose": True})
    assert (verbose.status, "verbose is not supported" in verbose.json()["error"]) == (400, True)


def test_probes_find_the_server(server: Server) -> None:
    version = server.request("/api/version")
    assert [part.isdecimal() for part in version.json()["version"].split(".")] == [True] * 3
    for path in ("/", "/api/version", "/api/tags"):
        head = server.request(path, method="HEAD")
        assert (head.status, head.body) == (200, b"")


def test_the_served_model_is_there_to_pull(ollama: Client, server: Server) -> None:
    assert ollama.pull(MODEL).status == "success"
    assert [step.status for step in ollama.pull(f"{MODEL}:latest", stream=True)] == ["success"]
    assert server.request("/api/pull", {"name": MODEL}).headers["content-type"] == "application/x-ndjson"
    for stream in (True, False):
        refused = server.request("/api/pull", {"model": "llama3.2", "stream": stream})
        assert refused.status == 404
        assert 'model "llama3.2" not found, this server has quire-demo' in refused.json()["error"]
    nothing = server.request("/api/pull", {})
    assert (nothing.status, nothing.json()) == (400, {"error": "model is missing; it is required"})


def test_models_are_not_managed(ollama: Client, server: Server) -> None:
    for manage in (
        lambda: ollama.create("new", from_=MODEL),
        lambda: ollama.copy(MODEL, "new"),
        lambda: ollama.delete(MODEL),
        lambda: ollama.push(MODEL),
        lambda: ollama.create_blob(folder_of_demo_model() / "config.json"),
    ):
        with pytest.raises(ResponseError, match="this server serves one model, quire-demo, which is chosen") as refused:
            manage()
        assert refused.value.status_code == 400
    assert server.request("/api/blobs/sha256:00", method="HEAD").status == 400


def test_errors_have_ollamas_shape(server: Server) -> None:
    for reply, status in (
        (server.request("/api/nothing"), 404),
        (server.request("/api/chat"), 405),
        (server.request("/api/chat", b"{"), 400),
    ):
        assert reply.status == status
        assert set(reply.json()) == {"error"}
        assert reply.headers["x-request-id"]


def test_keys_and_quotas_hold() -> None:
    with Server.start("--api-key", "secret", "--max-tokens-per-minute-per-key", "20") as server:
        for path in ("/api/tags", "/api/version"):
            assert server.request(path).status == 401
        refused = server.request("/api/chat", SHORT)
        assert (refused.status, "requires an API key" in refused.json()["error"]) == (401, True)
        client = Client(host=server.url, headers={"Authorization": "Bearer secret"})
        ones: Any = {"type": "array", "items": {"enum": [1]}, "minItems": 30}
        client.chat(MODEL, TALE, format=ones, options={"num_predict": 30})
        with pytest.raises(ResponseError, match="used up its 20 tokens per minute") as over:
            client.chat(MODEL, TALE)
        assert over.value.status_code == 429
        metrics = server.request("/metrics", headers={"Authorization": "Bearer secret"}).body.decode()
        assert '"/api/chat"' in metrics
        assert server.request("/ping").status == server.request("/health").status == 200


def test_a_failed_stream_ends_with_a_line_that_says_why() -> None:
    body = {"messages": TALE, "format": {"type": "array", "items": {"enum": [1]}, "minItems": 800}}
    with Server.start("--max-restarts", "0") as server:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{server.url}/api/chat", data, {"Content-Type": "application/json"})
        reply = cast("HTTPResponse", urllib.request.urlopen(request, timeout=PATIENCE))
        first = json.loads(reply.readline())
        os.kill(server.engine_pid, signal.SIGKILL)
        *_, last = [json.loads(line) for line in reply.read().splitlines()]
        assert server.process.wait(PATIENCE) == 1
    assert not first["done"]
    assert set(last) == {"error"}
    assert "engine" in last["error"]


def test_a_path_of_an_api_may_end_with_a_slash(server: Server) -> None:
    assert server.request("/v1/models/").json() == server.request("/v1/models").json()
    assert server.request("/v1/models/quire-demo/").json()["id"] == "quire-demo"
    assert server.request("/api/tags/").status == 200
    assert server.request("/api/chat/", SHORT).status == 200
    assert server.request("/v1/completions/", {"prompt": "x", "max_tokens": 1}).status == 200
    assert server.request("/docs/").status == 404  # whose links would lead elsewhere


def test_a_slash_at_the_end_bypasses_no_key() -> None:
    with Server.start("--api-key", "secret", "--root-path", "/quire") as server:
        server.url = server.url.removesuffix("/quire")  # the proxy's part
        assert server.request("/v1/models/").status == 401
        key = {"Authorization": "Bearer secret"}
        assert server.request("/v1/models/", headers=key).status == 200
        assert server.request("/api/tags/", headers=key).status == 200
