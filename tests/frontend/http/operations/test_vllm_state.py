"""`/load`, `/server_info` and `/tokenizer_info`, and other names of endpoints."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from demo_copies import model_with_template
from http_server import Server
from patience import PATIENCE
from raw_http import RawConnection, post

from quire.frontend import LLM


def test_the_load_is_the_number_of_open_requests(server: Server) -> None:
    assert server.request("/load").json() == {"server_load": 0}
    endless = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with RawConnection(server.url) as first, RawConnection(server.url) as second:
        for connection in (first, second):
            connection.send(post("/v1/completions", endless)).begin_reply().read(10)
        assert server.request("/load").json()["server_load"] == 2
    deadline = time.monotonic() + PATIENCE
    while server.request("/load").json()["server_load"]:  # the engine is told that they have left
        assert time.monotonic() < deadline


def test_the_engine_is_described(server: Server) -> None:
    info = server.request("/server_info").json()
    assert info["version"] == server.request("/version").json()["version"]
    config = info["vllm_config"]
    with LLM(engine_address=server.engine_address) as llm:
        stats, ready = llm.stats(), llm._engine.engines.ready
    assert config["model_config"]["served_model_name"] == ["quire-demo"]
    assert config["model_config"]["max_model_len"] == ready.max_model_len == 2048
    assert config["cache_config"]["num_blocks"] == stats["pages_total"]
    assert config["scheduler_config"] == {"max_num_seqs": ready.max_num_seqs}
    text = server.request("/server_info?config_format=text").json()["vllm_config"]
    assert json.loads(text) == config
    bad = server.request("/server_info?config_format=yaml")
    assert (bad.status, bad.error["param"]) == (400, "config_format")


def test_the_tokenizer_is_described(server: Server) -> None:
    info = server.request("/tokenizer_info").json()
    assert (info["tokenizer_class"], info["bos_token"]) == ("PreTrainedTokenizerFast", "<|begin|>")
    assert info["chat_template"] == server.request("/props").json()["chat_template"] != ""


def test_a_tokenizer_may_have_a_number_beyond_64_bits(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    folder = model_with_template(tmp_path / "model", template)
    file = folder / "tokenizer_config.json"
    endless = 1000000000000000019884624838656  # what the transformers library writes for "no limit"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": endless}))
    with Server.start(str(folder)) as server:
        info = server.request("/tokenizer_info").json()
    assert info["model_max_length"] == pytest.approx(endless)
    assert info["chat_template"] == template


def test_endpoints_have_the_names_of_llama_cpp(server: Server) -> None:
    assert server.request("/models").json() == server.request("/v1/models").json()
    assert (
        server.request("/v1/health").json() == server.request("/health").json() == {"status": "ok", "devices": ["cpu"]}
    )
    assert server.request("/lora-adapters").json() == []
    assert server.request("/lora-adapters", [{"id": 0, "scale": 0.5}]).status == 405
