"""Ministral 3, class Ministral3ForCausalLM (Mistral AI 2025), and the text part of Mistral3ForConditionalGeneration.

As Mistral with YaRN, and with queries that grow with their positions, as in Llama 4.
"""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Graph
from quire.kernels.models import mistral
from quire.kernels.models.decoder import Variant, build_decoder, heads_of, window_of
from quire.kernels.rope import QueryScale, Rope

_YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def build(config: ModelConfig) -> Graph:
    """Return the graph of a Ministral3ForCausalLM."""
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, max_position_embeddings=262144
    )
    if not config.options("rope_scaling") and not config.options("rope_parameters"):
        config = ModelConfig({**config.fields, "rope_parameters": _YARN}, config.path)
    config.restrict("layer_types")
    rope = Rope.from_config(config, heads_of(config).dim)
    return build_decoder(
        config,
        Variant(
            window=lambda config, layer: window_of(config), rotary=lambda layer: rope, query_scale=_query_scale(rope)
        ),
    )


def build_text_part(config: ModelConfig) -> Graph:
    """Return the graph of the text part of a Mistral3ForConditionalGeneration: a Ministral 3, or a Mistral."""
    kind = config.choice("model_type", ("ministral3", "mistral"))
    return (build if kind == "ministral3" else mistral.build)(config)


def _query_scale(rope: Rope) -> QueryScale | None:
    """Return the factors of queries, by the positions that the model was trained for at first."""
    if not rope.scaling.get("llama_4_scaling_beta"):
        return None
    if rope.scaling.get("original_max_position_embeddings") is None:
        raise ModelError(
            "config.json: rope_parameters has llama_4_scaling_beta, which needs original_max_position_embeddings there"
        )
    return QueryScale(rope.number("llama_4_scaling_beta"), rope.number("original_max_position_embeddings"))
