"""ModernBERT (Warner et al. 2024), an encoder: rotary embeddings, gated feed-forward, layers with local attention."""

from __future__ import annotations

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
from quire.kernels.models.decoder import activation_of, sliding_layers
from quire.kernels.pooling.heads import Classifier, HeadLinear, HeadNorm, activation_of_head, num_labels
from quire.kernels.rope import Rope

_THETAS = {"full_attention": ("global_rope_theta", 160000.0), "sliding_attention": ("local_rope_theta", 10000.0)}


def build(config: ModelConfig) -> Graph:
    """Return the graph of a ModernBertModel or ModernBertForSequenceClassification."""
    config = config.with_defaults(max_position_embeddings=8192)
    hidden, inner, vocab = (config.size(name) for name in ("hidden_size", "intermediate_size", "vocab_size"))
    num_heads, epsilon = config.size("num_attention_heads"), config.get("norm_eps", 1e-5)
    if hidden % num_heads:
        raise ModelError(f"config.json: hidden_size ({hidden}) must be a multiple of num_attention_heads ({num_heads})")
    heads = Heads(num_heads, num_heads, hidden // num_heads)
    activation = activation_of(config, "hidden_activation", "gelu")
    attention_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    norm_bias = config.get("norm_bias", False)
    window = config.size("local_attention", 128) // 2 + 1
    ropes = {kind: _rope(config, kind, heads.dim) for kind in _THETAS}

    def norm(name: str) -> Norm:
        return Norm(f"model.{name}.weight", epsilon, f"model.{name}.bias" if norm_bias else "", center=True)

    def linear(name: str, outputs: int, bias: bool, first: int = 0, tensor_outputs: int = 0) -> Linear:
        at = f"model.layers.{name}"
        return Linear(f"{at}.weight", outputs, f"{at}.bias" if bias else "", first=first, tensor_outputs=tensor_outputs)

    residuals = []
    for i, is_local in enumerate(_local_layers(config)):
        attention = Attention(
            (linear(f"{i}.attn.Wqkv", 3 * hidden, attention_bias),), linear(f"{i}.attn.Wo", hidden, attention_bias),
            heads, rotary=ropes["sliding_attention" if is_local else "full_attention"],
            window=window if is_local else 0, bidirectional=True,
        )  # fmt: skip
        gate, up = (linear(f"{i}.mlp.Wi", inner, mlp_bias, first, 2 * inner) for first in (0, inner))
        feed_forward = FeedForward(up, linear(f"{i}.mlp.Wo", hidden, mlp_bias), activation, gate)
        residuals.append(Residual(attention, norm(f"layers.{i}.attn_norm") if i else None))
        residuals.append(Residual(feed_forward, norm(f"layers.{i}.mlp_norm")))
    embedding = Embedding("model.embeddings.tok_embeddings.weight", vocab, hidden, norm=norm("embeddings.norm"))
    return Graph(embedding, tuple(residuals), HiddenStates(norm("final_norm")))


def classifier(config: ModelConfig) -> Classifier:
    """Return the head of a ModernBertForSequenceClassification."""
    activation = activation_of_head(config.get("classifier_activation", "gelu"))
    dense = HeadLinear(
        "head.dense", config.size("hidden_size"), config.get("classifier_bias", False), activation=activation
    )
    norm = HeadNorm("head.norm", config.get("norm_eps", 1e-5), config.get("norm_bias", False))
    pooling = config.choice("classifier_pooling", ("cls", "mean"), "cls")
    return Classifier(pooling, (dense, norm, HeadLinear("classifier", num_labels(config))))


def _local_layers(config: ModelConfig) -> list[bool]:
    """Return for each layer whether its attention is local: by `layer_types`, or else all but every n-th."""
    if config.strings("layer_types"):
        return sliding_layers(config, 1)
    every = config.size("global_attn_every_n_layers", 3)
    return [layer % every != 0 for layer in range(config.size("num_hidden_layers"))]


def _rope(config: ModelConfig, kind: str, head_dim: int) -> Rope:
    """Return the rotary embedding of the layers of a kind, which configs before transformers 5 name by its theta."""
    name, theta = _THETAS[kind]
    own = {"rope_theta": config.get(name, theta), **config.section("rope_parameters").options(kind)}
    fields = {"max_position_embeddings": config.size("max_position_embeddings"), "rope_parameters": own}
    return Rope.from_config(ModelConfig({**fields, "architectures": [config.architecture]}), head_dim)
