"""Adapters in GGUF files change the same as those that they were converted from."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from adapter_files import Arrays
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.kernels.adapted import HEAD
from quire.kernels.adapters.adapter import Adapter
from quire.kernels.adapters.changeable import Changeable
from quire.kernels.adapters.files import AdapterFile
from quire.kernels.adapters.gguf import read_gguf_adapter
from quire.kernels.adapters.shapes import linear_shapes, other_shapes
from quire.kernels.config import ModelConfig
from quire.kernels.errors import MemoryShortageError, ModelError
from quire.kernels.graph.operations import Graph
from quire.kernels.models import ARCHITECTURES

CONFIG = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 40, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "num_local_experts": 3, "num_experts_per_tok": 2, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
}  # fmt: skip
EXPERTS, RANK, ALPHA = 3, 4, 6.0
LLAMA = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
MIXTRAL = {"attn_k": "self_attn.k_proj", "ffn_gate_inp": "mlp.gate"}


@functools.cache
def graph_of(model: str) -> Graph:
    return ARCHITECTURES[model](ModelConfig({"architectures": [model], **CONFIG}))


def read(path: Path, model: str = "LlamaForCausalLM", **changes: Any) -> Adapter:
    graph = graph_of(model)
    options = {"heads": graph.attentions[0].heads, "max_rank": 64, "others": other_shapes(graph), **changes}
    return read_gguf_adapter(path, linear_shapes(graph), **options)


def write(path: Path, tensors: Arrays, architecture: str = "llama", q8_0: bool = False, **keys: Any) -> Path:
    """Write a file as convert_lora_to_gguf.py does, with other values of some `keys`, or none for None."""
    fields = {"general__type": "adapter", "adapter__type": "lora", "adapter__lora__alpha": ALPHA, **keys}
    writer = gguf.GGUFWriter(path, architecture)
    for field, value in fields.items():
        key = field.replace("__", ".")
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, array in tensors.items():
        is_quantized = q8_0 and array.shape[-1] % 32 == 0
        kind = gguf.GGMLQuantizationType.Q8_0
        data = gguf.quants.quantize(array, kind) if is_quantized else array
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind if is_quantized else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permuted(b: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows as llama.cpp's conversion orders those of q and k."""
    return b.reshape(heads, 2, -1, b.shape[1]).swapaxes(1, 2).reshape(b.shape)


def layers(
    names: dict[str, str], model: str, permutes: bool
) -> tuple[Arrays, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Return random tensors of a file for these layers, and A and B by the base's names."""
    rng, graph, stored, expected = np.random.default_rng(0), graph_of(model), {}, {}
    heads = {"attn_q": graph.attentions[0].heads.query, "attn_k": graph.attentions[0].heads.kv}
    for layer in range(2):
        for key, module in names.items():
            name = f"model.layers.{layer}.{module}.weight"
            outputs, inputs = linear_shapes(graph)[name]
            a, b = rng.standard_normal((RANK, inputs), np.float32), rng.standard_normal((outputs, RANK), np.float32)
            expected[name] = a, b
            at = f"blk.{layer}.{key}.weight"
            stored[f"{at}.lora_a"] = a
            stored[f"{at}.lora_b"] = permuted(b, heads[key]) if permutes and key in heads else b
    return stored, expected


@pytest.mark.parametrize(
    ("model", "architecture", "names", "permutes"),
    [
        ("LlamaForCausalLM", "llama", LLAMA, True),
        ("MistralForCausalLM", "llama", LLAMA, True),
        ("MixtralForCausalLM", "llama", MIXTRAL, True),
        ("Qwen3ForCausalLM", "qwen3", LLAMA, False),
        ("Qwen2ForCausalLM", "qwen2", LLAMA, False),
    ],
)
def test_layers_are_those_of_the_base(
    model: str, architecture: str, names: dict[str, str], permutes: bool, tmp_path: Path
) -> None:
    stored, expected = layers(names, model, permutes)
    adapter = read(write(tmp_path / "adapter.gguf", stored, architecture), model)
    assert adapter.layers.keys() == expected.keys()
    for name, (a, b) in expected.items():
        layer = adapter.layers[name]
        assert np.array_equal(layer.a, a)
        assert np.array_equal(layer.b, b)
        assert layer.scale == ALPHA / RANK


def test_experts_are_taken_apart(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((EXPERTS, RANK, 64), np.float32), rng.standard_normal((EXPERTS, 96, RANK), np.float32)
    at = "blk.1.ffn_up_exps.weight"
    path = write(tmp_path / "adapter.gguf", {f"{at}.lora_a": a, f"{at}.lora_b": b})
    adapter = read(path, "MixtralForCausalLM")
    assert len(adapter.layers) == EXPERTS
    for expert in range(EXPERTS):
        layer = adapter.layers[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"]
        assert np.array_equal(layer.a, a[expert])
        assert np.array_equal(layer.b, b[expert])


def test_embedding_and_head(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((RANK, 40), np.float32), rng.standard_normal((64, RANK), np.float32)
    stored = {"token_embd.weight.lora_a": a.T, "token_embd.weight.lora_b": b}
    stored |= {"output.weight.lora_a": b.T, "output.weight.lora_b": a.T}
    adapter = read(write(tmp_path / "adapter.gguf", stored))
    embedding, head = adapter.embeddings["model.embed_tokens.weight"], adapter.layers[HEAD]
    for change, (expected_a, expected_b) in ((embedding, (a, b)), (head, (b.T, a.T))):
        assert np.array_equal(change.a, expected_a)
        assert np.array_equal(change.b, expected_b)


def test_quantized_tensors_are_dequantized(tmp_path: Path) -> None:
    stored, expected = layers(LLAMA, "LlamaForCausalLM", permutes=True)
    adapter = read(write(tmp_path / "adapter.gguf", stored, q8_0=True))
    for name, (a, b) in expected.items():
        assert np.abs(adapter.layers[name].a - a).max() < 0.05
        assert np.array_equal(adapter.layers[name].b, b)


def test_alpha_of_0_means_a_scale_of_1_and_texts_are_kept(tmp_path: Path) -> None:
    stored, _ = layers(MIXTRAL | {"attn_v": "self_attn.v_proj"}, "MixtralForCausalLM", permutes=True)
    texts: dict[str, Any] = {"adapter__lora__task_name": "sums", "adapter__lora__prompt_prefix": "Add:\n"}
    for alpha in (None, 0.0):
        path = write(tmp_path / "adapter.gguf", stored, adapter__lora__alpha=alpha, **texts)
        adapter = read(path, "MixtralForCausalLM")
        assert {layer.scale for layer in adapter.layers.values()} == {1.0}
        assert (adapter.task_name, adapter.prompt_prefix) == ("sums", "Add:\n")


QUERY = "blk.0.attn_q.weight"


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def tensors(**changes: np.ndarray | None) -> Arrays:
    """Return the tensors of one layer, some of them others or missing."""
    made: dict[str, np.ndarray | None] = {f"{QUERY}.lora_a": ones(RANK, 64), f"{QUERY}.lora_b": ones(64, RANK)}
    made |= {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in made.items() if value is not None}


BAD: list[tuple[Arrays, str, dict[str, Any], str]] = [
    ({}, "llama", {}, "has no tensors; convert the adapter again"),
    (tensors(), "llama", {"general__type": "model"}, "has 'model' as general.type; it must be 'adapter'"),
    (tensors(), "llama", {"general__type": None}, "lacks general.type; it must be 'adapter'"),
    (tensors(), "llama", {"adapter__type": "control"}, "has 'control' as adapter.type; it must be 'lora'"),
    (tensors(), "llama", {"general__type": [7] * 10_000}, "has [7, 7, 7, "),
    (tensors(), "llama", {"general__tags": [7] * 10_001}, "promises 10001 numbers; the most is 10000"),
    (tensors(), "llama", {"general__description": "x" * 400_000}, "is damaged: its header goes on beyond byte "),
    (tensors(**{f"x{number}": ones(1) for number in range(200)}), "llama", {}, "promises 202 tensors; the most is "),
    (tensors(), "mamba", {}, "has 'mamba' as general.architecture; supported are "),
    (tensors(), "llama", {"adapter__lora__alpha": float("nan")}, "has nan as adapter.lora.alpha; it must be a finite"),
    (tensors(), "llama", {"adapter__lora__alpha": "1"}, "has '1' as adapter.lora.alpha; it must be a finite"),
    (tensors(), "llama", {"adapter__alora__invocation_tokens": [1]}, "adapters that begin at some tokens are not"),
    (tensors(), "llama", {"adapter__lora__task_name": 1.0}, "has 1.0 as adapter.lora.task_name; it must be a text"),
    (tensors(blk__0__attn_q__weight__lora_b=None), "llama", {}, "lacks the lora_b of model.layers.0.self_attn.q_proj"),
    (tensors(blk__0__attn_q__weight__lora_a=None), "llama", {}, "lacks the lora_a of model.layers.0.self_attn.q_proj"),
    (tensors(blk__0__attn_q__weight__lora_b=ones(48, RANK)), "llama", {}, "lora_b has shape [48, 4], but"),
    (tensors(blk__0__attn_q__weight__lora_a=ones(RANK, 32)), "llama", {}, "lora_a has shape [4, 32], but"),
    (
        tensors(blk__0__attn_q__weight__lora_a=ones(65, 64)),
        "llama",
        {},
        "from 1 to 64, which is max_lora_rank",
    ),
    (tensors(blk__0__attn_q__weight__lora_a=ones(64)), "llama", {}, "has shape [64]; it must be a matrix"),
    (tensors(blk__0__attn_q__weight__lora_b=np.full((64, RANK), np.inf, np.float16)), "llama", {}, "NaN or infinite"),
    (tensors(blk__0__attn_q__weight__lora_b=np.ones((64, RANK), np.int8)), "llama", {}, "can't be dequantized"),
    (tensors(blk__0__attn_norm__weight=ones(64)), "llama", {}, "1 tensors that are not of this base model, or not"),
    (tensors(blk__9__attn_v__weight__lora_a=ones(4, 64)), "llama", {}, "not supported: blk.9.attn_v.weight.lora_a;"),
    (tensors(blk__0__attn_norm__weight__lora_a=ones(4, 64)), "llama", {}, "1 tensors that are not of this base model"),
    (tensors(blk__0__ffn_up_exps__weight__lora_a=ones(3, 4, 64)), "llama", {}, "1 tensors that are not of this base"),
    (tensors(blk__00__attn_q__weight__lora_a=ones(4, 64)), "llama", {}, "1 tensors that are not of this base model"),
]


@pytest.mark.parametrize(("stored", "architecture", "keys", "message"), BAD)
def test_what_is_not_supported_is_an_error(
    stored: Arrays, architecture: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "adapter.gguf", stored, architecture, **keys)
    with pytest.raises(ModelError) as error:
        read(path)
    assert message in str(error.value)
    assert str(error.value).isprintable()


def test_an_adapter_of_another_architecture_is_an_error(tmp_path: Path) -> None:
    """Files of `llama` have the rows of queries and keys in another order than those of `qwen3`."""
    path = write(tmp_path / "adapter.gguf", tensors())
    for model_class in ("LlamaForCausalLM", "OfAnotherEngine"):
        assert read(path, model_class=model_class).layers
    with pytest.raises(ModelError, match="that of the base model, Qwen3ForCausalLM, is qwen3; convert the adapter"):
        read(path, model_class="Qwen3ForCausalLM")


@pytest.mark.parametrize("shape", [(2, RANK, 64), (RANK, 64)])
def test_stacks_of_another_number_of_experts_are_an_error(shape: tuple[int, ...], tmp_path: Path) -> None:
    at = "blk.1.ffn_up_exps.weight"
    path = write(tmp_path / "adapter.gguf", {f"{at}.lora_a": ones(*shape), f"{at}.lora_b": ones(EXPERTS, 96, RANK)})
    with pytest.raises(ModelError, match="the first of its 3 sizes must be 3, the experts of the base model"):
        read(path, "MixtralForCausalLM")


def test_layers_that_the_conversion_changes_are_an_error(tmp_path: Path) -> None:
    at = "blk.0.attn_output.weight"
    path = write(tmp_path / "adapter.gguf", {f"{at}.lora_a": ones(RANK, 64), f"{at}.lora_b": ones(64, RANK)}, "gpt2")
    with pytest.raises(ModelError, match="of a layer that is another one in GGUF files; give PEFT's folder"):
        read(path, "GPT2LMHeadModel")


@pytest.mark.parametrize(
    ("model", "at", "shapes", "name"),
    [
        ("LlamaForCausalLM", "token_embd", ((40, RANK), (64, RANK)), "model.embed_tokens.weight"),
        ("LlamaForCausalLM", "output", ((RANK, 64), (40, RANK)), HEAD),
        ("MixtralForCausalLM", "blk.1.ffn_up_exps", ((3, RANK, 64), (3, 96, RANK)), "model.layers.1.mlp.experts.*.up"),
    ],
)
def test_what_can_not_be_changed_is_an_error(
    model: str, at: str, shapes: tuple[tuple[int, ...], ...], name: str, tmp_path: Path
) -> None:
    stored = {f"{at}.weight.lora_{half}": ones(*shape) for half, shape in zip("ab", shapes, strict=True)}
    layers_of_attention: Any = Changeable(frozenset({"model.layers.0.self_attn.q_proj.weight"}), None)  # type: ignore[arg-type]
    path = write(tmp_path / "adapter.gguf", tensors() | stored)
    with pytest.raises(ModelError, match=re.escape(f"changes {name}")):
        read(path, model, changeable=layers_of_attention)
    read(write(path, tensors()), model, changeable=layers_of_attention)


@pytest.mark.parametrize("q8_0", [False, True])
def test_no_tensor_is_read_without_memory_for_all(q8_0: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are in the file, as floats if they are not, the A of an embedding once more, and once they are packed."""
    rng = np.random.default_rng(0)
    stored = {
        "token_embd.weight.lora_a": rng.standard_normal((40, 32), np.float32),
        "token_embd.weight.lora_b": rng.standard_normal((64, 32), np.float32),
    }
    path, read_tensors = write(tmp_path / "adapter.gguf", stored, q8_0=q8_0), []
    original, size, elements = AdapterFile.tensor, 34 / 32 if q8_0 else 4, (40 + 64) * 32
    needed = int(elements * (size + 2) + 4 * (elements if q8_0 else 0) + 4 * 40 * 32)

    def tensor(file: AdapterFile, given: Any) -> Any:
        read_tensors.append(given.name)
        return original(file, given)

    monkeypatch.setattr(AdapterFile, "tensor", tensor)
    name = "model.embed_tokens.weight"

    def changeable(free: int) -> Changeable:
        return Changeable(frozenset(), None, frozenset({name}), element_bytes=2, free_bytes=lambda: free)  # type: ignore[arg-type]

    with pytest.raises(
        MemoryShortageError, match=f"take {needed} bytes of memory to read and pack, and {needed - 1} are"
    ):
        read(path, changeable=changeable(needed - 1))
    assert not read_tensors
    assert read(path, changeable=changeable(needed)).embeddings.keys() == {name}


def test_data_is_read_only_once_all_shapes_are_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lengths, original = [], AdapterFile.read

    def counted(file: AdapterFile, start: int, count: int) -> Any:
        lengths.append(count)
        return original(file, start, count)

    monkeypatch.setattr(AdapterFile, "read", counted)
    path = write(tmp_path / "adapter.gguf", tensors(blk__0__attn_k__weight__lora_a=np.zeros((1 << 16, 64), np.float32)))
    with pytest.raises(ModelError, match="lacks the lora_b"):
        read(path)
    assert sum(lengths) < 1 << 19 < path.stat().st_size


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "pipe", "null\0", ""):
        with pytest.raises(ModelError, match="can't be read"):
            read(tmp_path / name)


def cut(raw: bytearray, place: int, piece: bytes) -> None:
    del raw[place:]


def replaced(raw: bytearray, place: int, piece: bytes) -> None:
    raw[place : place + len(piece)] = piece


@given(st.sampled_from([cut, replaced]), st.integers(0, 3000), st.binary(min_size=1, max_size=4))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_file_is_read_or_rejected(
    tmp_path: Path, mutate: Callable[[bytearray, int, bytes], None], place: int, piece: bytes
) -> None:
    path = tmp_path / "adapter.gguf"
    if not path.exists():
        write(path, tensors())
    raw = bytearray(path.read_bytes())
    mutate(raw, place, piece)
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(raw)
    message = ""
    try:
        adapter = read(changed)
    except ModelError as error:
        message = str(error)
    if message:
        assert message.isprintable()
        return
    assert all(np.isfinite(layer.a).all() and np.isfinite(layer.b).all() for layer in adapter.layers.values())
