"""GTE v1.5 and gte-multilingual (Zhang et al. 2024): BERT with rotary embeddings and gated feed-forward.

The class is NewModel in the checkpoints of its authors, and GteModel in `transformers`.
"""

from __future__ import annotations

from dataclasses import replace

from quire.kernels.attention_heads import Heads
from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import (
    Attention,
    Embedding,
    FeedForward,
    Graph,
    HiddenStates,
    Linear,
    Norm,
    Residual,
)
from quire.kernels.models.decoder import activation_of
from quire.kernels.pooling.heads import Classifier, HeadLinear, num_labels
from quire.kernels.rope import Rope


def build(config: ModelConfig) -> Graph:
    """Return the graph of a NewModel or NewForSequenceClassification."""
    for name, allowed in (("position_embedding_type", "rope"), ("layer_norm_type", "layer_norm"), ("pack_qkv", True)):
        config.restrict(name, (allowed,))
    config.restrict("logn_attention_scale", (False,))
    config = config.with_defaults(max_position_embeddings=8192)
    hidden, inner, vocab = (config.size(name) for name in ("hidden_size", "intermediate_size", "vocab_size"))
    num_heads, epsilon = config.size("num_attention_heads"), config.get("layer_norm_eps", 1e-12)
    if hidden % num_heads:
        raise ModelError(f"config.json: hidden_size ({hidden}) must be a multiple of num_attention_heads ({num_heads})")
    heads = Heads(num_heads, num_heads, hidden // num_heads)
    activation, rope = activation_of(config, "hidden_act", "gelu"), _rope(config, heads.dim)
    prefix = _prefix(config)

    def norm(name: str) -> Norm:
        return Norm(f"{prefix}.{name}.weight", epsilon, f"{prefix}.{name}.bias", center=True)

    def linear(name: str, outputs: int) -> Linear:
        return Linear(f"{prefix}.{name}.weight", outputs, f"{prefix}.{name}.bias")

    residuals = []
    for i in range(config.size("num_hidden_layers")):
        layer = f"encoder.layer.{i}"
        projections, output = (
            linear(f"{layer}.attention.qkv_proj", 3 * hidden),
            linear(f"{layer}.attention.o_proj", hidden),
        )
        attention = Attention((projections,), output, heads, rotary=rope, bidirectional=True)
        weight = f"{prefix}.{layer}.mlp.up_gate_proj.weight"
        up, gate = (Linear(weight, inner, first=first, tensor_outputs=2 * inner) for first in (0, inner))
        feed_forward = FeedForward(up, linear(f"{layer}.mlp.down_proj", hidden), activation, gate)
        residuals.append(Residual(attention, None, around=norm(f"{layer}.attn_ln")))
        residuals.append(Residual(feed_forward, None, around=norm(f"{layer}.mlp_ln")))
    embedding = Embedding(
        f"{prefix}.embeddings.word_embeddings.weight", vocab, hidden, norm=norm("embeddings.LayerNorm")
    )
    if config.get("type_vocab_size", 1):
        types = f"{prefix}.embeddings.token_type_embeddings.weight"
        embedding = replace(embedding, types=types, num_types=config.size("type_vocab_size", 1))
    return Graph(embedding, tuple(residuals), HiddenStates(None))


def classifier(config: ModelConfig) -> Classifier:
    """Return the head of a NewForSequenceClassification."""
    pooler = HeadLinear(f"{_prefix(config)}.pooler.dense", config.size("hidden_size"), activation="tanh")
    return Classifier("cls", (pooler, HeadLinear("classifier", num_labels(config))))


def _prefix(config: ModelConfig) -> str:
    return "gte" if config.architecture.startswith("Gte") else "new"


def _rope(config: ModelConfig, head_dim: int) -> Rope:
    """Return the rotary embedding; `ntk` multiplies its base by the factor, and divides all frequencies alike.

    See https://kexue.fm/archives/9706. The length in config.json is that with the scaling.
    """
    scaling = config.section("rope_scaling")
    if scaling.get("type", "") != "ntk":
        return Rope.from_config(config.with_defaults(rope_theta=160000.0), head_dim)
    scaling.restrict("mixed_b")
    factor = scaling.positive("factor")
    own = {"rope_type": "linear", "factor": factor ** (2 / head_dim)}
    fields = {**config.fields, "rope_theta": config.positive("rope_theta", 10000.0) * factor, "rope_scaling": own}
    return replace(Rope.from_config(ModelConfig(fields), head_dim), extended=True)
