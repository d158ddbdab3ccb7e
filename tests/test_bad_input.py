"""Invalid checkpoints are rejected at the start, with a message that says what is wrong and where."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_model import CONFIG, weights, write

from quire.kernels import host
from quire.kernels.errors import ModelError
from quire.kernels.options import LoadOptions
from quire.kernels.runner import describe, load_model
from quire.kernels.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from conftest import EngineFactory

INDEX = "model.safetensors.index.json"


def shard(folder: Path) -> dict[str, Any]:
    """Split the checkpoint over two files; return a copy of the index, to be damaged."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return index


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A complete checkpoint, to be damaged."""
    return write(tmp_path / "model", weights())


def start_error(engine: EngineFactory, model: Path, **options: Any) -> str:
    """Return the error with which an engine fails to start with this model."""
    from quire.frontend.errors import EngineStartError

    with pytest.raises((EngineStartError, ValueError)) as caught:
        engine(model, skip_tokenizer_init=True, **options)
    message = str(caught.value)
    assert "Traceback" not in message
    return message


def test_the_checkpoint_is_good_before_it_is_damaged(good: Path, engine: EngineFactory) -> None:
    from quire.frontend import SamplingParams

    once = engine(good, skip_tokenizer_init=True)
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, detokenize=False)
    whole = once.generate([[1, 2]], params)[0].outputs[0].token_ids
    shard(good)
    again = engine(good, skip_tokenizer_init=True)
    assert again.generate([[1, 2]], params)[0].outputs[0].token_ids == whole
    assert len(whole) == 3


def test_a_missing_tensor_is_named(good: Path, engine: EngineFactory) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    write(good, {key: value for key, value in weights().items() if key != name})
    assert name in start_error(engine, good)


@pytest.mark.parametrize(
    ("name", "found", "expected"),
    [
        ("model.layers.1.mlp.up_proj.weight", (64, 96), (96, 64)),
        ("model.layers.0.self_attn.k_proj.weight", (32, 64), (64, 64)),
        ("model.embed_tokens.weight", (120, 64), (128, 64)),
        ("model.norm.weight", (65,), (64,)),
        ("lm_head.weight", (128, 64, 1), (128, 64)),
    ],
)
def test_a_wrong_shape_is_named_with_both_shapes(
    good: Path, engine: EngineFactory, name: str, found: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    write(good, {**weights(), name: np.zeros(found, np.float32)})
    message = start_error(engine, good)
    assert name in message
    for shape in (found, expected):
        assert re.search(r"\b" + r"\D{1,3}".join(map(str, shape)) + r"\b", message), f"{shape} is not in {message}"


def test_a_tensor_of_integers_is_rejected(good: Path, engine: EngineFactory) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    write(good, {**weights(), name: np.zeros((64, 64), np.int64)})
    assert name in start_error(engine, good)


def cut_in_half(file: Path) -> None:
    """Cut the file as an interrupted download does."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def cut_the_header(file: Path) -> None:
    """Cut the file within its header."""
    file.write_bytes(file.read_bytes()[:100])


def corrupt_the_header(file: Path) -> None:
    """Replace the header by text that is not JSON."""
    content = bytearray(file.read_bytes())
    content[8:12] = b"\xff\xff{{"
    file.write_bytes(content)


def claim_a_huge_header(file: Path) -> None:
    """Replace the header length by one beyond any file."""
    content = bytearray(file.read_bytes())
    content[:8] = (1 << 62).to_bytes(8, "little")
    file.write_bytes(content)


def empty(file: Path) -> None:
    """Remove all bytes."""
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut_in_half, cut_the_header, corrupt_the_header, claim_a_huge_header, empty])
def test_a_damaged_file_is_named(good: Path, engine: EngineFactory, damage: Callable[[Path], None]) -> None:
    damage(good / "model.safetensors")
    assert "model.safetensors" in start_error(engine, good)


def rewrite_header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Let `change` modify the header; the data stays."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def test_offsets_that_disagree_with_the_shape_are_rejected(good: Path, engine: EngineFactory) -> None:
    def lengthen(header: dict[str, Any]) -> None:
        header["model.norm.weight"]["data_offsets"][1] += 4

    rewrite_header(good / "model.safetensors", lengthen)
    assert "model.norm.weight" in start_error(engine, good)


def move_onto_its_neighbour(header: dict[str, Any]) -> None:
    """Let one tensor have the bytes of another of its size."""
    header["model.layers.1.mlp.up_proj.weight"]["data_offsets"] = header["model.layers.1.mlp.gate_proj.weight"][
        "data_offsets"
    ]


def overlap_by_a_value(header: dict[str, Any]) -> None:
    """Let one tensor begin 4 bytes before its predecessor ends."""
    entry = header["model.layers.1.mlp.up_proj.weight"]
    entry["data_offsets"] = [offset - 4 for offset in entry["data_offsets"]]


def forget_a_tensor(header: dict[str, Any]) -> None:
    """Leave a hole."""
    del header["model.layers.1.mlp.gate_proj.weight"]


def negate_the_shape(header: dict[str, Any]) -> None:
    """Keep the product of the sizes."""
    header["model.layers.1.mlp.up_proj.weight"]["shape"] = [-96, -64]


def begin_before_the_data(header: dict[str, Any]) -> None:
    """Move a tensor into the header."""
    entry = header["model.layers.1.mlp.up_proj.weight"]
    entry["data_offsets"] = [offset - 10**7 for offset in entry["data_offsets"]]


def end_after_the_data(header: dict[str, Any]) -> None:
    """Move a tensor past the end of the file."""
    entry = header["model.layers.1.mlp.up_proj.weight"]
    entry["data_offsets"] = [offset + 10**7 for offset in entry["data_offsets"]]


def swap_begin_and_end(header: dict[str, Any]) -> None:
    """Let a tensor end before it begins."""
    header["model.layers.1.mlp.up_proj.weight"]["data_offsets"].reverse()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (move_onto_its_neighbour, "model.layers.1.mlp.gate_proj.weight and model.layers.1.mlp.up_proj.weight overlap"),
        (overlap_by_a_value, "overlap"),
        (forget_a_tensor, "no tensor has the bytes from"),
        (negate_the_shape, "can't have the shape [-96, -64]"),
        (begin_before_the_data, "can't have"),
        (end_after_the_data, "is truncated"),
        (swap_begin_and_end, "can't have"),
    ],
)
def test_tensors_that_do_not_follow_one_another_are_rejected(
    good: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    rewrite_header(good / "model.safetensors", change)
    with pytest.raises(ModelError, match=re.escape(words)) as caught:
        Checkpoint(str(good))
    assert str(good / "model.safetensors") in str(caught.value)
    assert "model.layers.1.mlp.up_proj.weight" in str(caught.value)


def test_bytes_after_the_last_tensor_are_rejected(good: Path, engine: EngineFactory) -> None:
    with (good / "model.safetensors").open("ab") as file:
        file.write(bytes(12))
    assert "no tensor has the last 12 bytes" in start_error(engine, good)


def test_an_index_that_names_an_absent_file_is_rejected(good: Path, engine: EngineFactory) -> None:
    shard(good)
    (good / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in start_error(engine, good)


def test_an_index_that_names_the_wrong_file_for_a_tensor_is_rejected(good: Path, engine: EngineFactory) -> None:
    index = shard(good)
    name, file = next((name, file) for name, file in index["weight_map"].items() if "00001" in file)
    index["weight_map"][name] = file.replace("00001", "00002", 1)
    (good / INDEX).write_text(json.dumps(index))
    assert name in start_error(engine, good)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"lm_head.weight": 3}}'])
def test_a_damaged_index_is_named(good: Path, engine: EngineFactory, text: str) -> None:
    shard(good)
    (good / INDEX).write_text(text)
    assert INDEX in start_error(engine, good)


def test_an_index_cannot_reach_out_of_the_folder(good: Path, engine: EngineFactory) -> None:
    index = shard(good)
    (good / "model-00001-of-00002.safetensors").rename(good.parent / "outside.safetensors")
    moved = {name: file.replace("model-00001-of-00002", "../outside") for name, file in index["weight_map"].items()}
    (good / INDEX).write_text(json.dumps({"weight_map": moved}))
    assert "outside.safetensors" in start_error(engine, good)


def test_an_unknown_architecture_is_rejected_with_the_known_ones(good: Path, engine: EngineFactory) -> None:
    write(good, weights(), {**CONFIG, "architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    message = start_error(engine, good).lower()
    for word in ("mamba", "gpt2", "llama", "mistral", "qwen2", "qwen3"):
        assert word in message


@pytest.mark.parametrize(
    ("architecture", "fields", "words"),
    [
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping is -1.0; it must be above 0"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"rope_theta": 1e4}}, "an object for each of sliding_attention"),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"]}, "for each of the 2 layers"),
        ("Gemma3ForConditionalGeneration", {"text_config": {"vocab_size": "x"}}, "text_config.vocab_size is 'x'"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "su", "long_factor": [1.0]}}, "short_factor of rope scaling"),
        ("Starcoder2ForCausalLM", {"mlp_type": "gated"}, "mlp_type is 'gated'"),
        ("GraniteForCausalLM", {"logits_scaling": 0.0}, "logits_scaling is 0.0; it must be above 0"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers is [1]; it must list 0 or 1"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [0, 0]}, "no layer has a rotary embedding"),
        ("Cohere2ForCausalLM", {"sliding_window": None}, "lacks sliding_window"),
        ("Cohere2ForCausalLM", {"use_qk_norm": True}, "use_qk_norm is True"),
        ("Cohere2ForCausalLM", {"layer_types": ["chunked_attention"] * 2}, "layer_types is"),
        ("DeepseekV2ForCausalLM", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; it must be one of 'greedy'"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True, "routed_scaling_factor": 2.0}, "norm_topk_prob is True"),
        ("DeepseekV2ForCausalLM", {"num_experts_per_tok": None}, "lacks num_experts_per_tok"),
        ("DeepseekV2ForCausalLM", {"q_lora_rank": None, "attention_bias": True}, "only with a q_lora_rank"),
        ("DeepseekV2ForCausalLM", {"qk_nope_head_dim": 48}, "qk_nope_head_dim is 48; latent attention needs a"),
        ("DeepseekV2ForCausalLM", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax", "first_k_dense_replace": 0}, "scoring_func is 'softmax'"),
        ("ApertusForCausalLM", {"hidden_act": "silu"}, "hidden_act is 'silu', which is not supported"),
        ("ApertusForCausalLM", {"hidden_act": "xielu", "qk_norm": False}, "qk_norm is False"),
        ("Ernie4_5ForCausalLM", {"compression_ratio": 2.0}, "compression_ratio is 2.0"),
        ("Ernie4_5_MoeForCausalLM", {"use_bias": True}, "use_bias is True"),
        ("Ernie4_5_MoeForCausalLM", {"moe_layer_end_index": [5, 7]}, "moe_layer_end_index is [5, 7]"),
        ("Exaone4ForCausalLM", {"sliding_window": 64, "sliding_window_pattern": "LLLG"}, "_pattern is 'LLLG'"),
        ("Exaone4ForCausalLM", {"sliding_window": 64, "layer_types": ["full_attention"] * 2}, "no sliding_attention"),
        ("Glm4MoeForCausalLM", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types is ['sparse', 'dense']"),
        ("HunYuanDenseV1ForCausalLM", {"use_qk_norm": False}, "use_qk_norm is False"),
        ("MiniMaxM2ForCausalLM", {"attn_type_list": [1, 0]}, "attn_type_list is [1, 0]"),
        ("Ministral3ForCausalLM", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "needs original_max_position_"),
        ("Mistral3ForConditionalGeneration", {"text_config": {"model_type": "x"}}, "text_config.model_type is 'x'"),
        ("Olmo3ForCausalLM", {"rope_parameters": {"local": {}}}, "an object for each of sliding_attention"),
        ("DeepseekV3ForCausalLM", {"n_group": 5, "first_k_dense_replace": 0}, "divided into 5 groups (n_group)"),
    ],
)  # fmt: skip
def test_a_variant_that_is_not_carried_out_is_rejected_with_its_field(
    good: Path, architecture: str, fields: dict[str, Any], words: str
) -> None:
    write(good, weights(), {**CONFIG, "num_experts_per_tok": 2, "architectures": [architecture], **fields})
    with pytest.raises(ModelError, match=re.escape(words)):
        describe(LoadOptions(str(good)))


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "architectures"]
)
def test_a_config_without_a_field_is_rejected_with_its_name(good: Path, engine: EngineFactory, field: str) -> None:
    write(good, weights(), {key: value for key, value in CONFIG.items() if key != field})
    assert field in start_error(engine, good)


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("hidden_size", -64, "hidden_size"),
        ("hidden_size", "64", "hidden_size"),
        ("num_attention_heads", 0, "num_attention_heads"),
        ("num_key_value_heads", 3, "num_key_value_heads"),
        ("rms_norm_eps", "small", "rms_norm_eps"),
        ("rope_scaling", {"rope_type": "spiral", "factor": 2.0}, "rope_type"),
        ("rope_scaling", {"rope_type": "linear"}, "factor"),
        ("hidden_act", "sine", "hidden_act"),
        ("num_hidden_layers", 10**9, "num_hidden_layers"),
        ("max_position_embeddings", 10**10, "max_position_embeddings"),
        ("rope_theta", -1.0, "rope_theta"),
        ("rope_theta", "abc", "rope_theta"),
        ("rope_scaling", {"rope_type": ["linear"]}, "rope_type"),
        ("rope_scaling", {"rope_type": "linear", "factor": "x"}, "factor"),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 0}, "factor"),
    ],
)
def test_a_config_with_a_bad_value_is_rejected_with_its_name(
    good: Path, engine: EngineFactory, field: str, value: object, word: str
) -> None:
    write(good, weights(), {**CONFIG, field: value})
    assert word in start_error(engine, good)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("LlamaForCausalLM", {"num_attention_heads": 4097}),
        ("Qwen3NextForCausalLM", {"linear_num_key_heads": 4097}),
        ("Qwen3NextForCausalLM", {"linear_num_value_heads": 1 << 23}),
        ("Qwen3NextForCausalLM", {"linear_num_key_heads": 2048, "num_hidden_layers": 100}),
        ("Qwen3_5ForCausalLM", {"num_attention_heads": 1 << 23}),
        ("GraniteMoeHybridForCausalLM", {"mamba_n_heads": 1 << 20}),
        ("GraniteMoeHybridForCausalLM", {"mamba_n_groups": 1 << 20, "mamba_n_heads": 1, "mamba_d_head": 128}),
        ("FalconH1ForCausalLM", {"mamba_n_heads": 4097}),
        ("NemotronHForCausalLM", {"mamba_num_heads": 4097, "hybrid_override_pattern": "M*"}),
        ("NemotronHForCausalLM", {"n_groups": 4097, "hybrid_override_pattern": "M*"}),
        ("NemotronHForCausalLM", {"n_routed_experts": 1 << 23, "hybrid_override_pattern": "E*"}),
        ("NemotronHForCausalLM", {"n_routed_experts": 512, "hybrid_override_pattern": "E" * 999 + "*"}),
        ("Lfm2MoeForCausalLM", {"num_experts": 1 << 23, "num_dense_layers": 0, "layer_types": ["full_attention"] * 2}),
        ("Glm4MoeForCausalLM", {"n_routed_experts": 4097}),
        ("Gemma4ForCausalLM", {"num_experts": 1 << 23, "enable_moe_block": True, "top_k_experts": 2}),
        ("GptOssForCausalLM", {"num_local_experts": 4096, "num_hidden_layers": 1000}),
        ("Gemma3nForCausalLM", {"altup_num_inputs": 1 << 23, "num_kv_shared_layers": 0}),
    ],
)
def test_more_heads_or_experts_than_any_model_has_are_rejected_at_once(
    good: Path, architecture: str, fields: dict[str, Any]
) -> None:
    """Graphs have an object for each, before anyone sees that the checkpoint has no such tensors."""
    write(good, weights(), {**CONFIG, "num_experts_per_tok": 2, "architectures": [architecture], **fields})
    field, value = next(iter(fields.items()))
    with pytest.raises(ModelError, match=rf"{field} is {value}; it must be from 1 to \d{{3,4}}$"):
        describe(LoadOptions(str(good)))


@pytest.mark.parametrize(
    ("architecture", "fields", "words"),
    [
        ("Qwen3NextForCausalLM", {"linear_conv_kernel_dim": 65}, "65 taps; they must be a multiple of 16, and from 2"),
        ("Qwen3NextForCausalLM", {"linear_key_head_dim": 1 << 20}, "key heads of 1048576 elements; there may be up to"),
        ("GraniteMoeHybridForCausalLM", {"mamba_d_conv": 1 << 20, "mamba_n_heads": 8}, "and 1048576 taps"),
        ("GraniteMoeHybridForCausalLM", {"mamba_d_state": 8192, "mamba_n_heads": 8}, "key heads of 8192 elements"),
        ("Lfm2ForCausalLM", {"conv_L_cache": 1 << 20}, "1048576 taps; they must be a multiple of 16, and from 2 to 64"),
        ("NemotronHForCausalLM", {"layers_block_type": ["attention"] * 1001}, "for each of up to 1000 layers"),
    ],
)
def test_larger_states_than_any_model_has_are_rejected_at_once(
    good: Path, architecture: str, fields: dict[str, Any], words: str
) -> None:
    kinds = ["conv" if architecture.startswith("Lfm2") else "linear_attention", "full_attention"]
    fields = {"layer_types": kinds, "num_experts_per_tok": 2, **fields}
    write(good, weights(), {**CONFIG, "architectures": [architecture], **fields})
    with pytest.raises(ModelError, match=re.escape(words)):
        describe(LoadOptions(str(good)))


def test_a_config_that_asks_for_more_than_there_is_takes_no_memory(good: Path) -> None:
    """Its table of rotary embeddings would take 128 GiB."""
    write(good, weights(), {**CONFIG, "head_dim": 1 << 24, "max_position_embeddings": 2048})
    with pytest.raises(ModelError, match="has shape"):
        describe(LoadOptions(str(good)))


def test_a_table_that_does_not_fit_into_memory_is_rejected(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(good, weights(), {**CONFIG, "max_position_embeddings": 1 << 23})
    monkeypatch.setattr(host, "available_memory", lambda: 1 << 30)
    with pytest.raises(ModelError, match="weights and buffers take"):
        load_model(LoadOptions(str(good), num_pages=8, threads=2))


@pytest.mark.parametrize("text", ["", "{", "[]", '"text"'])
def test_a_config_that_is_not_an_object_is_rejected(good: Path, engine: EngineFactory, text: str) -> None:
    (good / "config.json").write_text(text)
    assert "config.json" in start_error(engine, good)


def test_a_folder_without_config_or_weights_is_rejected(good: Path, engine: EngineFactory) -> None:
    (good / "model.safetensors").unlink()
    assert "safetensors" in start_error(engine, good)
    (good / "config.json").unlink()
    assert "config.json" in start_error(engine, good)


def test_a_path_that_is_not_a_folder_is_rejected(good: Path, engine: EngineFactory) -> None:
    for path in (good / "absent", good / "config.json"):
        assert str(path) in start_error(engine, path)


def test_too_little_memory_for_a_page_is_rejected_with_what_is_needed(good: Path, engine: EngineFactory) -> None:
    message = start_error(engine, good, kv_cache_memory_bytes=1000)
    assert "1000" in message.replace(",", "")
    assert "page" in message


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_weight_that_is_not_finite_is_rejected_with_its_tensor(
    good: Path, name: str, value: float, dtype: str
) -> None:
    tensors = weights()
    tensors[name].flat[-1] = value
    write(good, tensors)
    with pytest.raises(ModelError, match=f"{re.escape(name)} .*infinity or a NaN") as caught:
        load_model(LoadOptions(str(good), num_pages=8, threads=2, dtype=dtype))
    assert str(good) in str(caught.value)


def test_a_weight_beyond_bf16_is_rejected(good: Path) -> None:
    tensors = weights()
    tensors["lm_head.weight"][20, 3] = np.finfo(np.float32).max
    write(good, tensors)
    load_model(LoadOptions(str(good), num_pages=8, threads=2, dtype="float32"))
    with pytest.raises(ModelError, match=r"lm_head.weight can't be packed: weight columns 16 to 31 .* range of bf16"):
        load_model(LoadOptions(str(good), num_pages=8, threads=2, dtype="bfloat16"))


def test_norms_that_overflow_are_an_error_instead_of_an_empty_answer(good: Path, engine: EngineFactory) -> None:
    """With zeros for hidden states, all logits would be equal, and token 0 ends the answer."""
    from quire.frontend import RequestError, SamplingParams

    tensors = weights()
    tensors["model.embed_tokens.weight"][...] = 1e30
    write(good, tensors)
    llm = engine(good, skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="NaN"):
        llm.generate([[1, 2]], SamplingParams(max_tokens=3, temperature=0.0, detokenize=False))


def test_another_engine_is_unharmed(good: Path, demo_model: Path, engine: EngineFactory) -> None:
    from quire.frontend import SamplingParams

    llm = engine(demo_model)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    before = llm.generate("Once upon a time", params)[0].outputs[0].text
    (good / "model.safetensors").write_bytes(b"")
    start_error(engine, good)
    assert llm.generate("Once upon a time", params)[0].outputs[0].text == before


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_a_file_that_is_not_utf8_is_named(good: Path, name: str) -> None:
    shard(good)
    (good / name).write_bytes(b'{"weight_map": {"\xca": "b"}}')
    with pytest.raises(ModelError, match=name):
        Checkpoint(str(good)).eos_token_ids()


def test_a_header_that_is_not_utf8_is_rejected(good: Path) -> None:
    header = b'{"\xca": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}'
    (good / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ModelError, match="safetensors header can't be read"):
        Checkpoint(str(good))


def test_a_shard_with_an_impossible_name_is_rejected(good: Path) -> None:
    shard(good)
    (good / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "../b"}}))
    with pytest.raises(ModelError, match="is said to be in"):
        Checkpoint(str(good))


@pytest.mark.parametrize(
    "entries",
    [
        {"a\nb": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}},
        {"a" * 5000: {"dtype": "F32", "shape": [], "data_offsets": [0, 5]}},
        {"a": {"dtype": "F" * 5000, "shape": [], "data_offsets": [0, 5]}},
        {"a": {"dtype": "F32", "shape": [1] * 5000, "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [10**600], "data_offsets": [0, 10**600]}},
    ],
)
def test_an_error_does_not_quote_at_length(good: Path, entries: dict[str, Any]) -> None:
    header = json.dumps(entries).encode()
    (good / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ModelError) as raised:
        Checkpoint(str(good))
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 500


def test_an_index_does_not_get_quoted_at_length(good: Path) -> None:
    shard(good)
    for name, file in (("lm_head.weight", "a\nb"), ("lm_head.weight", "a" * 5000), ("a" * 5000, "b"), ("a\nb", "b")):
        (good / INDEX).write_text(json.dumps({"weight_map": {name: file}}))
        with pytest.raises(ModelError, match=r"characters is not allowed; names of tensors and files") as raised:
            Checkpoint(str(good))
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 500


def test_ids_that_no_vocabulary_has_end_no_answer(good: Path) -> None:
    (good / "generation_config.json").write_text('{"eos_token_id": [3, -1, true, 1.5, 18446744073709551616, null, 5]}')
    assert Checkpoint(str(good)).eos_token_ids() == [3, 5]


@pytest.mark.parametrize("header", ['{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", '{"a": {"dtype": "F32"}}', "[]"])
def test_an_invalid_header_is_rejected(good: Path, engine: EngineFactory, header: str) -> None:
    text = header.encode()
    (good / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert "safetensors header" in start_error(engine, good)


def test_a_shape_that_overflows_is_rejected(good: Path, engine: EngineFactory) -> None:
    entry = {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 0]}
    text = json.dumps({"model.norm.weight": entry}).encode()
    (good / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert "model.norm.weight" in start_error(engine, good)


def test_folders_instead_of_files_are_rejected(good: Path, engine: EngineFactory) -> None:
    (good / "generation_config.json").mkdir()
    assert "generation_config.json" in start_error(engine, good)
    (good / "model.safetensors").unlink()
    (good / INDEX).mkdir()
    assert INDEX in start_error(engine, good)


def test_a_huge_config_is_refused(good: Path) -> None:
    with (good / "config.json").open("r+b") as sparse:
        sparse.truncate(8 << 30)
    with pytest.raises(ModelError, match=r"config.json has more than 100000000 bytes"):
        Checkpoint(str(good))
