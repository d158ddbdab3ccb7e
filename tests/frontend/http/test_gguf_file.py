"""A server of a GGUF file without the extension, as Ollama's blobs are: its names, defaults and description."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf
from http_server import Server

BLOB = "sha256-6e9f90f02bb3b39b59e81916e8cfce9deb45aeaeb9a54a5be4414486b907dc1e"
SILENT = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.05}


def start(file: Path, *arguments: str) -> Server:
    return Server.start(str(file), *arguments, environment={"XDG_CACHE_HOME": str(file.parent / "cache")})


@pytest.fixture(scope="module")
def blob(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a file that says nothing about sampling."""
    file = tmp_path_factory.mktemp("gguf") / BLOB
    write_gguf(demo_model, file, "Q8_0", metadata={"general.file_type": 7})
    with start(file) as server:
        yield server


def defaults_of(server: Server) -> dict[str, Any]:
    [card] = server.request("/v1/models").json()["data"]
    return {name: card["sampling_defaults"][name] for name in SILENT}


def test_a_file_is_known_by_its_first_letters(blob: Server) -> None:
    assert blob.model == BLOB
    assert blob.request("/v1/completions", {"prompt": "Once upon a", "max_tokens": 2}).status == 200


def test_a_silent_file_has_the_defaults_of_llama_cpp_in_all_apis(blob: Server) -> None:
    assert defaults_of(blob) == SILENT
    parameters = blob.request("/api/show", {}).json()["parameters"].split("\n")
    assert sorted(parameters) == sorted(f"{name} {value}" for name, value in SILENT.items())
    settings = blob.request("/completion", {"prompt": "Once", "n_predict": 1}).json()["generation_settings"]
    assert {name: settings[name] for name in SILENT} == SILENT
    greedy, seeds = {"temperature": 0, "max_tokens": 12}, [{"seed": seed, "max_tokens": 12} for seed in range(4)]
    plain = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.05}

    def texts(*fields: dict[str, Any]) -> list[str]:
        bodies = [{"prompt": "Once upon a time", **each} for each in fields]
        return [blob.request("/v1/completions", body).json()["choices"][0]["text"] for body in bodies]

    assert texts(*seeds) == texts(*(plain | each for each in seeds)), "OpenAI's routes have them too"
    assert texts(*seeds) != texts(*(greedy for _ in seeds))


def test_the_file_and_the_flags_come_first_and_the_log_has_the_outcome(demo_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "tales.gguf"
    keys = {"general.sampling.temp": 0.5, "general.sampling.top_k": 7, "general.sampling.penalty_repeat": 1.5}
    write_gguf(demo_model, file, "Q8_0", metadata=keys)
    with start(file, "--top-k", "9") as server:
        assert defaults_of(server) == SILENT | {"temperature": 0.5, "top_k": 9}
        server.stop()
    line = "sampling defaults: temperature=0.5, top_p=0.95, top_k=9, min_p=0.05, repetition_penalty=1.5"
    assert any(line in each for each in server.log), server.log


def test_ollamas_clients_see_a_gguf_file_with_its_sizes(blob: Server) -> None:
    [listed] = blob.request("/api/tags").json()["models"]
    [running] = blob.request("/api/ps").json()["models"]
    shown = blob.request("/api/show", {"model": BLOB}).json()
    for details in (listed["details"], running["details"], shown["details"]):
        assert (details["format"], details["family"], details["quantization_level"]) == ("gguf", "qwen3", "Q8_0")
        assert details["parameter_size"] == "5.25M"
    assert listed["size"] > 5_000_000
    assert shown["model_info"]["general.parameter_count"] == 5_246_976


def test_a_server_may_have_another_chat_template(demo_model: Path, tmp_path: Path) -> None:
    """A GGUF file has no folder to put one into."""
    source = "{% for message in messages %}<{{ message.role }}> {{ message.content }}{% endfor %}"
    file, template = tmp_path / "tales.gguf", tmp_path / "plain.jinja"
    write_gguf(demo_model, file, "Q8_0")
    template.write_text(source, encoding="utf-8")
    messages = [{"role": "user", "content": "Once upon a time"}]
    for given in (str(template), source):
        with start(file, "--chat-template", given) as server:
            rendered = server.request("/apply-template", {"messages": messages}).json()["prompt"]
            assert rendered == "<user> Once upon a time"
            body = {"max_tokens": 6, "temperature": 0}
            chat = server.request("/v1/chat/completions", {"messages": messages, **body}).json()
            plain = server.request("/v1/completions", {"prompt": rendered, **body, "add_special_tokens": False}).json()
            assert chat["choices"][0]["message"]["content"] == plain["choices"][0]["text"].strip()
            assert server.request("/api/show", {}).json()["template"] == source
            assert server.request("/props").json()["chat_template"] == source
