"""A model that does not fit is refused with what would fit, before its weights are read."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from quire_command import quire_command

from quire.kernels import host
from quire.kernels.errors import MemoryShortageError, ModelError
from quire.kernels.fit import advised
from quire.kernels.options import LoadOptions
from quire.kernels.runner import PreparedModel, choose_memory, describe
from quire.kernels.survey import survey

MIB = 1 << 20
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
    "num_key_value_heads": 8, "num_hidden_layers": 16, "vocab_size": 32768, "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> LoadOptions:
    """A checkpoint of 0.5 GB that takes no space: its file has a header, and a hole for the weights."""
    sizes = {"model.embed_tokens.weight": (32768, 1024), "model.norm.weight": (1024,)}
    for layer in range(16):
        at = f"model.layers.{layer}"
        sizes |= {f"{at}.{name}_layernorm.weight": (1024,) for name in ("input", "post_attention")}
        sizes |= {f"{at}.self_attn.{name}_proj.weight": (1024, 1024) for name in "qo"}
        sizes |= {f"{at}.self_attn.{name}_proj.weight": (512, 1024) for name in "kv"}
        sizes |= {f"{at}.mlp.{name}_proj.weight": (4096, 1024) for name in ("gate", "up")}
        sizes[f"{at}.mlp.down_proj.weight"] = (1024, 4096)
    header, end = {}, 0
    for name, shape in sizes.items():
        begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"head_dim": 64}))
    return LoadOptions(str(tmp_path), max_num_batched_tokens=256)


def refusal(options: LoadOptions) -> str:
    with pytest.raises(ModelError) as refused, advised(options):
        PreparedModel(options)
    return str(refused.value)


def is_fit(options: LoadOptions) -> bool:
    plan, _ = describe(options)
    try:
        pages = choose_memory(plan, options)[0].pages
    except MemoryShortageError:
        return False
    return pages * options.block_size >= plan.limits.max_model_len


@pytest.mark.parametrize("has_limit", [True, False])
@pytest.mark.parametrize("memory", [700 * MIB, 1000 * MIB, 1600 * MIB])
def test_advice_names_the_longest_context_of_each_format(
    model: LoadOptions, memory: int, has_limit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_limit:
        options = replace(model, memory_limit=memory)
        message = refusal(options)
        assert f"memory_limit={memory} is below" in message
    else:
        options = model
        monkeypatch.setattr(host, "available_memory", lambda: memory // 2)
        with pytest.raises(ModelError) as refused, advised(options):
            raise MemoryShortageError("short")
        message = str(refused.value)
    _, _, ways = message.partition("it fits with ")
    assert ways
    for way in ways.split(", or with "):
        format_ = re.search(r"quantization=(\w+)", way)
        length = int(found[1]) if (found := re.search(r"max_model_len=(\d+)", way)) else 40960
        advice = replace(options, quantization=format_ and format_[1], max_model_len=length)
        assert is_fit(advice), way
        assert length == 40960 or not is_fit(replace(advice, max_model_len=min(2 * length, 40960))), way


def test_weights_beyond_the_free_memory_are_refused(model: LoadOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 450 * MIB)
    message = refusal(model)
    assert message.startswith("weights and buffers take")
    assert re.search(
        r"; it fits with quantization=int8 and max_model_len=\d+, or with quantization=int4 and max_model_len=\d+$",
        message,
    )


def test_a_pool_below_the_context_is_reported(
    model: LoadOptions, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(model, quantization="int4")
    monkeypatch.setattr(host, "available_memory", lambda: 1000 * MIB)
    PreparedModel(options)
    assert "tokens, and max_model_len is 40960: longer requests will be rejected" in caplog.text
    caplog.clear()
    PreparedModel(replace(options, max_model_len=1024))
    PreparedModel(replace(options, num_pages=31))  # as chosen
    assert not caplog.text


@pytest.mark.parametrize("name", ["kv_cache_memory_bytes", "num_pages"])
def test_a_size_of_the_kv_cache_that_does_not_fit_is_named(
    model: LoadOptions, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 2000 * MIB)
    huge = 10**15 if name == "kv_cache_memory_bytes" else 10**8
    chosen: dict[str, Any] = {name: huge}
    message = refusal(replace(model, **chosen))
    found = re.fullmatch(
        rf"{name}={huge} is too much: \d+ KV pages take \d+ bytes, but \d+ are free next to the weights; "
        rf"lower {name} to (\d+) or less, or leave it out",
        message,
    )
    assert found is not None, message
    chosen[name] = int(found[1])
    lower = replace(model, **chosen)
    choose_memory(describe(lower)[0], lower)  # fits


def test_a_model_that_fits_in_no_format_is_refused(model: LoadOptions) -> None:
    assert refusal(replace(model, memory_limit=400 * MIB)).endswith(
        "no number format makes it fit at 512 tokens of context; choose a smaller model"
    )


def test_a_file_beyond_the_address_space_is_no_damaged_one(model: LoadOptions) -> None:
    code = (
        "import resource, sys; from quire.kernels.weights.checkpoint import Checkpoint; "
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize(); "
        "resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2); Checkpoint(sys.argv[1])"
    )
    command = [sys.executable, "-P", "-c", code, model.model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    message = done.stderr.splitlines()[-1]
    assert re.search(r"model.safetensors can't be mapped: its \d+ bytes exceed .* \(`ulimit -v` limits", message)
    assert "incomplete" not in message


def test_a_survey_goes_by_the_options_of_the_engine(model: LoadOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 1000 * MIB)
    as_it_is = survey(model.model, {"max_num_batched_tokens": 256, "max_waiting_requests": 9})
    assert (as_it_is["supported"], as_it_is["fits"]) == (True, True)
    without_room = survey(model.model, {"max_num_batched_tokens": 256, "num_pages": 1 << 20})
    assert (without_room["supported"], without_room["fits"]) == (True, False)
    assert "num_pages=1048576 is too much" in without_room["problem"]
    small = survey(model.model, {"max_num_batched_tokens": 256, "quantization": "int4"})
    assert small["memory_bytes"] < as_it_is["memory_bytes"]


def test_a_survey_counts_the_state_of_a_hybrid(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the layers are convolutions, which keep two positions; two are attention, with two heads of 64."""
    monkeypatch.setattr(host, "available_memory", lambda: 2000 * MIB)
    state, page = 2 * 2 * 256 * 4, 2 * (2 * 2 * 64) * 32 * 4
    hybrid = str(checkpoints / "lfm2-tied")
    found = survey(hybrid, {"max_num_seqs": 4, "num_pages": 64})
    assert (found["state_records"], found["state_bytes"]) == (4 + 64 // 4, state)
    too_large = survey(hybrid, {"max_num_seqs": 4, "num_pages": 1 << 20})
    taken = (1 << 20) * page + (4 + (1 << 20) // 4) * state
    assert f"1048576 KV pages take {taken} bytes" in too_large["problem"]
    assert survey(str(checkpoints / "qwen3-tied"), {})["state_records"] == 0


def test_quire_models_says_what_the_state_of_a_hybrid_takes(checkpoints: Path, tmp_path: Path) -> None:
    snapshots = tmp_path / "models--org--hybrid" / "snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / "abcdef0").symlink_to(checkpoints / "lfm2-tied")
    command = quire_command("models", "--download-dir", tmp_path)
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"org/hybrid .* and KV for \d+ tokens, \d+ states of 4 KiB", listed)
