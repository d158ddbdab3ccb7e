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
        ({"general.type": "adapter"}, "an adapter such as a LoRA; give its model"),
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


HYBRID = {
    "general.architecture": "qwen35", "qwen35.block_count": 3, "qwen35.context_length": 4096,
    "qwen35.embedding_length": 64, "qwen35.feed_forward_length": 96, "qwen35.attention.head_count": 4,
    "qwen35.attention.head_count_kv": 2, "qwen35.attention.key_length": 16, "qwen35.attention.value_length": 16,
    "qwen35.attention.layer_norm_rms_epsilon": 1e-6, "qwen35.rope.dimension_count": 8,
    "qwen35.rope.dimension_sections": [2, 1, 1, 0], "qwen35.ssm.conv_kernel": 4, "qwen35.ssm.state_size": 16,
    "qwen35.ssm.group_count": 2, "qwen35.ssm.time_step_rank": 4, "qwen35.ssm.inner_size": 128,
    "qwen35.nextn_predict_layers": 1, "qwen35.attention.recurrent_layers": [True, False, False],
}  # fmt: skip


def hybrid(*tensors: Any, **changes: Any) -> GgufModel:
    """Return a model whose layers have a state and attention, and a layer for multi-token prediction after them."""
    changed = {f"qwen35.{key.replace('__', '.')}": value for key, value in changes.items()}
    return dataclasses.replace(added(model(), *tensors), metadata={**HYBRID, **changed})


def test_of_the_layers_for_multi_token_prediction_the_first_is_read() -> None:
    head = ("attn_q", (128, 64)), ("nextn.eh_proj", (64, 128)), ("nextn.enorm", (64,)), ("nextn.embed_tokens", (9, 64))
    given = hybrid(
        zeros("blk.1.attn_q.weight", 128, 64),
        *(zeros(f"blk.{layer}.{name}.weight", *shape) for layer in (2, 3) for name, shape in head),
        block_count=4, nextn_predict_layers=2,
    )  # fmt: skip
    config = config_of(given)
    assert (config["num_hidden_layers"], config["layer_types"]) == (2, ["linear_attention", "full_attention"])
    assert {part.name for part in parts_of(given)} == {
        "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight", "mtp.layers.0.self_attn.q_proj.weight",
        "mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight",
    }  # fmt: skip
    assert {part.offset for part in parts_of(given) if "norm" in part.name} == {1.0}
    with pytest.raises(ModelError, match=r"blk.4.attn_q.weight, which a qwen35 of 2 layers"):
        config_of(added(given, zeros("blk.4.attn_q.weight", 128, 64)))
    with pytest.raises(ModelError, match=r"has 1 as qwen35.nextn_predict_layers; it must be below the 1 layers"):
        config_of(hybrid(block_count=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention__recurrent_layers": [True]}, "recurrent_layers; it must be true or false for each of 2 layers"),
        ({"attention__head_count_kv": [2, 4, 2]}, "head_count_kv; it must be the same for all layers that have"),
        ({"attention__head_count_kv": [-1, 2, 2]}, "head_count_kv; it must be an integer from 0 on, or one for each"),
        ({"ssm__inner_size": 126}, "ssm.inner_size; it must be a multiple of ssm.time_step_rank, 4"),
        ({"ssm__conv_kernel": None}, "lacks qwen35.ssm.conv_kernel"),
    ],
)
def test_bad_fields_of_layers_with_state_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_of(hybrid(**changes))


def test_tensors_of_layers_with_state_have_the_form_of_a_folder(tmp_path: Path) -> None:
    """Rates of decay keep their bits, and those from the hidden states are floats whatever their type."""
    rng = np.random.default_rng(0)
    rates, taps = -np.exp(rng.normal(-2, 2, (32, 1))).astype(np.float32), rng.random((48, 4), np.float32)
    norm, times = rng.random((2, 64), np.float32), rng.random((32, 64), np.float32)
    blocks = gguf.quants.quantize(times, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen35")
    writer.add_uint32("qwen35.block_count", 1)
    writer.add_tensor("blk.0.ssm_a", rates)
    writer.add_tensor("blk.0.ssm_conv1d.weight", taps)
    writer.add_tensor("blk.0.ssm_norm.weight", norm)
    writer.add_tensor("blk.0.ssm_alpha.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "config.json").write_text("{}")
    checkpoint, at = open_checkpoint(str(tmp_path)), "model.layers.0.linear_attn"
    tensor = checkpoint.get(f"{at}.A_log", (32,))
    assert tensor.decay_rates().tobytes() == rates.tobytes()
    np.testing.assert_allclose(-np.exp(tensor.to_f32()), rates[:, 0], rtol=1e-5)
    np.testing.assert_array_equal(checkpoint.get(f"{at}.conv1d.weight", (48, 1, 4)).to_f32()[:, 0], taps)
    np.testing.assert_array_equal(checkpoint.get(f"{at}.norm.weight", (128,)).to_f32(), norm.reshape(-1))
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(checkpoint.get(f"{at}.in_proj_a.weight", (32, 64)).to_f32(), values)


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
