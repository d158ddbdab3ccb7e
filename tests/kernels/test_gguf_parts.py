"""GGUF files: the tensors of a model folder as parts of theirs, and files that are refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_models import METADATA, added, gguf_tensor, model, zeros

from quire.kernels.errors import ModelError
from quire.kernels.gguf.config import config_of, generation_config_of
from quire.kernels.gguf.container import GgufModel
from quire.kernels.gguf.parts import parts_of
from quire.kernels.weights.gguf_checkpoint import open_checkpoint
from quire.kernels.weights.quantized.gguf import Gguf


@pytest.mark.parametrize(
    "name",
    ["blk.2.attn_q.weight", "blk.0.attn_sinks.weight", "blk.0.attn_q.scale", "blk.00.attn_q.weight", "attn_q.weight",
     "blk.\u0661.attn_q.weight", "cls.output.weight", "v.patch_embd.weight"],
)  # fmt: skip
def test_tensors_that_the_architecture_does_not_have_are_refused_by_name(name: str) -> None:
    with pytest.raises(ModelError, match=rf"has tensor {name}, which a qwen3 of 2 layers"):
        config_of(added(model(), zeros(name, 64, 64)))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.type": "adapter"}, "an adapter such as a LoRA; merge it"),
        ({"general.type": "mmproj"}, "the projector of a multimodal model"),
        ({"general.architecture": "clip"}, "the projector of a multimodal model"),
        ({"general.type": "imatrix"}, "an importance matrix"),
        ({"general.architecture": "mamba"}, "'mamba'; supported in GGUF files are apertus, bert, cohere2"),
    ],
)
def test_files_that_are_no_model_say_what_they_are(metadata: dict[str, Any], message: str) -> None:
    given = model()
    with pytest.raises(ModelError, match=message) as caught:
        config_of(dataclasses.replace(given, metadata=given.metadata | metadata, tensors={}))
    assert "\n" not in str(caught.value)


def test_tokens_that_end_a_turn_are_known_by_their_texts() -> None:
    tokens = ["<s>", "</s>", "<end_of_turn>", "<|im_end|>", "<|end|>", "a"]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 3, 3, 1, 3, 1]}
    assert generation_config_of({**metadata, "tokenizer.ggml.eos_token_id": 5})["eos_token_id"] == [1, 2, 4, 5]
    tokens[0] = "<|return|>"
    assert generation_config_of(metadata)["eos_token_id"] == [0, 1, 2]


def test_a_tensor_of_query_key_and_value_is_three_of_a_folder() -> None:
    rows = np.arange((4 + 2 + 2) * 16 * 64, dtype=np.float32).reshape(-1, 64)
    given = added(model(attention__head_count_kv=2), gguf_tensor("blk.1.attn_qkv.weight", "F32", rows.shape, rows))
    parts = {part.name.split(".")[-2]: part for part in parts_of(given) if "self_attn" in part.name}
    for name, first, count in (("q_proj", 0, 64), ("k_proj", 64, 32), ("v_proj", 96, 32)):
        part = parts[name]
        assert part.shape == (count, 64)
        assert np.shares_memory(part.data, given.tensors["blk.1.attn_qkv.weight"].data)
        np.testing.assert_array_equal(part.data.view(np.float32).reshape(part.shape), rows[first : first + count])
    with pytest.raises(ModelError, match=r"attn_qkv.weight with 128 rows; its heads have 192"):
        config_of(added(model(), gguf_tensor("blk.1.attn_qkv.weight", "F32", rows.shape, rows)))


MIXTURE = {
    "general.architecture": "qwen3moe", **{key.replace("qwen3", "qwen3moe"): value for key, value in METADATA.items()
    if key.startswith("qwen3.")}, "qwen3moe.expert_count": 3, "qwen3moe.expert_used_count": 2,
    "qwen3moe.expert_feed_forward_length": 32,
}  # fmt: skip


def mixture(*tensors: Any, **changes: Any) -> GgufModel:
    """Return a model with experts."""
    changed = {f"qwen3moe.{key}": value for key, value in changes.items()}
    given = added(model(), *tensors)
    return dataclasses.replace(given, metadata={**MIXTURE, **changed})


def test_experts_are_slices_of_their_stack() -> None:
    blocks = gguf.quants.quantize(
        np.random.default_rng(0).normal(size=(3, 32, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0
    )
    both = np.arange(3 * 64 * 64, dtype=np.float32).reshape(3, 64, 64)
    given = mixture(
        gguf_tensor("blk.0.ffn_up_exps.weight", "Q8_0", (3, 32, 64), blocks),
        gguf_tensor("blk.1.ffn_gate_up_exps.weight", "F32", both.shape, both),
        zeros("blk.0.ffn_gate_inp.weight", 3, 64),
    )  # fmt: skip
    config = config_of(given)
    assert config["quantization_config"]["types"]["model.layers.0.mlp.experts.*.up_proj"] == "Q8_0"
    assert Gguf(config["quantization_config"]["types"]).format_of("model.layers.0.mlp.experts.2.up_proj") is not None
    assert (config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"]) == (3, 2, 32)
    parts = {part.name: part for part in parts_of(given)}
    assert parts["model.layers.0.mlp.gate.weight"].shape == (3, 64)
    up = parts["model.layers.0.mlp.experts.*.up_proj.weight"]
    assert up.shape == (32, 64)
    assert up.data[2].tobytes() == blocks[2].tobytes()
    for part, half in (("gate", both[:, :32]), ("up", both[:, 32:])):
        found = parts[f"model.layers.1.mlp.experts.*.{part}_proj.weight"]
        assert np.shares_memory(found.data, given.tensors["blk.1.ffn_gate_up_exps.weight"].data)
        np.testing.assert_array_equal(found.data[1].view(np.float32).reshape(found.shape), half[1])


@pytest.mark.parametrize("count", [2, 4, 1 << 31])
def test_the_number_of_experts_is_that_of_their_stack(count: int) -> None:
    with pytest.raises(ModelError, match=rf"the first of its 3 sizes must be {count}, the number of experts"):
        config_of(mixture(zeros("blk.0.ffn_up_exps.weight", 3, 32, 64), expert_count=count))


def test_an_expert_is_found_by_its_number(tmp_path: Path) -> None:
    stack = np.random.default_rng(0).normal(size=(3, 8, 4)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe")
    writer.add_uint32("qwen3moe.block_count", 1)
    writer.add_uint32("qwen3moe.expert_count", 3)
    writer.add_tensor("blk.0.ffn_up_exps.weight", stack)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(str(tmp_path))
    for number in range(3):
        tensor = checkpoint.get(f"model.layers.0.mlp.experts.{number}.up_proj.weight", (8, 4))
        assert not tensor.stored.flags.owndata
        np.testing.assert_array_equal(tensor.to_f32(), stack[number])
    with pytest.raises(ModelError, match=r"experts.3.up_proj.weight of shape .* is missing"):
        checkpoint.get("model.layers.0.mlp.experts.3.up_proj.weight", (8, 4))
    assert checkpoint.formats == {"f32"}


def test_the_offset_of_norms_is_taken_off_so_that_adding_it_gives_the_stored_values(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).normal(0, 0.4, 4096).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    writer.add_uint32("gemma3.block_count", 1)
    writer.add_tensor("output_norm.weight", weights + np.float32(1))
    writer.add_tensor("token_embd.weight", weights.reshape(64, 64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(str(tmp_path))
    found = checkpoint.get("model.norm.weight", (4096,)).to_f32()
    np.testing.assert_array_equal(found + np.float32(1), weights + np.float32(1))
    np.testing.assert_allclose(found, weights, atol=1e-7)
    np.testing.assert_array_equal(checkpoint.get("model.embed_tokens.weight", (64, 64)).to_f32().reshape(-1), weights)
