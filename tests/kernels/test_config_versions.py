"""A model is the same graph whether its config.json has the fields of transformers 5 or those of before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Attention, Graph, LatentAttention
from quire.kernels.models import build_graph

POSITIONS = 200
SIZES = {
    "vocab_size": 500, "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
}  # fmt: skip
YARN = {"factor": 8.0, "original_max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
WINDOW = {"sliding_window": 64, "layer_types": [*["sliding_attention"] * 3, "full_attention"]}
OLMO3_BEFORE = {"rope_theta": 5e4, "rope_scaling": {"rope_type": "yarn", **YARN}}
OLMO3 = {
    "full_attention": {"rope_type": "yarn", "rope_theta": 5e4, **YARN},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 64, "n_routed_experts": 4}
VERSIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # the class, the fields of before, those of now
    "apertus": (
        "ApertusForCausalLM", {"rope_theta": 1e6, "rope_scaling": {"type": "llama3", **LLAMA3}, "qk_norm": True},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, **LLAMA3}},
    ),
    "apertus-defaults": (
        "ApertusForCausalLM", {"rope_theta": 12e6, "rope_scaling": {"rope_type": "llama3", **LLAMA3,
                               "original_max_position_embeddings": 8192}}, {},
    ),
    "ernie": ("Ernie4_5ForCausalLM", {"rope_theta": 5e4}, {"rope_parameters": {"rope_theta": 5e4}}),
    "exaone-period": (
        "Exaone4ForCausalLM", {"rope_theta": 1e6, "sliding_window": 64, "sliding_window_pattern": 4},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, **WINDOW, "sliding_window_pattern": "LLLG"},
    ),
    "exaone-without-window": (
        "Exaone4ForCausalLM", {"sliding_window": None, "sliding_window_pattern": None},
        {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "glm": (
        "Glm4MoeForCausalLM", {**EXPERTS, "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        {**EXPERTS, "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}},
    ),
    "glm-lite": (
        "Glm4MoeLiteForCausalLM", {**EXPERTS, "rope_theta": 1e6, "first_k_dense_replace": 2, "num_key_value_heads": 4},
        {**EXPERTS, "rope_parameters": {"rope_theta": 1e6}, "num_key_value_heads": 4,
         "mlp_layer_types": ["dense", "dense", "sparse", "sparse"]},
    ),
    "hunyuan": (
        "HunYuanDenseV1ForCausalLM", {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "alpha": 50.0}},
        {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 1e4}},
    ),
    "minimax": (
        "MiniMaxM2ForCausalLM", {**EXPERTS, "rotary_dim": 32, "attn_type_list": [1] * 4},
        {**EXPERTS, "rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5}},
    ),
    "ministral": (
        "Ministral3ForCausalLM",
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN, "llama_4_scaling_beta": 0.2}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN, "llama_4_scaling_beta": 0.2}},
    ),
    "olmo": ("Olmo3ForCausalLM", {**OLMO3_BEFORE, **WINDOW}, {"rope_parameters": OLMO3, **WINDOW}),
    "olmo-early": (
        "Olmo3ForCausalLM", {"rope_parameters": OLMO3["full_attention"], "sliding_window": 64},
        {"rope_parameters": OLMO3, **WINDOW},
    ),
    "seed": (
        "SeedOssForCausalLM", {"rope_theta": 1e7, "rope_scaling": None, "attention_out_bias": False},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
    ),
}  # fmt: skip


def built(architecture: str, fields: dict[str, Any]) -> Graph:
    return build_graph(ModelConfig({**SIZES, "architectures": [architecture], **fields}))


def tables(graph: Graph) -> list[Any]:
    """Return what each layer's rotary embedding does."""
    ropes = [attention.rotary for attention in graph.attentions]
    return [rope and (rope.dim, rope.interleaved, rope.reach, rope.table(POSITIONS).tobytes()) for rope in ropes]


def without_ropes(graph: Graph) -> list[Any]:
    """Return the rest of the graph, since ropes are equal only to themselves."""
    residuals = []
    for residual in graph.residuals:
        block = residual.block
        if isinstance(block, Attention):
            block = replace(block, rotary=None)
        parts = vars(block) | {"rotary": None} if isinstance(block, LatentAttention) else block
        residuals.append((parts, residual.before, residual.after))
    return [graph.embedding, residuals, graph.logits]


@pytest.mark.parametrize("name", VERSIONS)
def test_fields_of_both_versions_give_the_same_graph(name: str) -> None:
    architecture, before, now = VERSIONS[name]
    graphs = built(architecture, before), built(architecture, now)
    assert tables(graphs[0]) == tables(graphs[1])
    assert without_ropes(graphs[0]) == without_ropes(graphs[1])


def test_layers_with_a_window_have_their_own_rotary_embedding() -> None:
    olmo, exaone = (
        tables(built(name, {**OLMO3_BEFORE, **WINDOW})) for name in ("Olmo3ForCausalLM", "Exaone4ForCausalLM")
    )
    assert olmo[0] == olmo[1] == olmo[2] != olmo[3]
    assert exaone[0] == exaone[1] == exaone[2] != exaone[3] is None


def test_the_text_part_of_a_mistral_is_that_of_its_kind() -> None:
    scaling = VERSIONS["ministral"][2]
    for kind, name, more in (("ministral3", "Ministral3ForCausalLM", scaling), ("mistral", "MistralForCausalLM", {})):
        outer = {"text_config": {**SIZES, "model_type": kind, "tie_word_embeddings": True, **more}}
        multimodal = built("Mistral3ForConditionalGeneration", {**outer, "tie_word_embeddings": False})
        text = built(name, {**more, "tie_word_embeddings": False})
        assert tables(multimodal) == tables(text)
        assert without_ropes(multimodal) == without_ropes(text)
    with pytest.raises(ModelError, match=r"text_config\.model_type"):
        built("Mistral3ForConditionalGeneration", {"text_config": SIZES})
