"""BERT, RoBERTa and XLM-RoBERTa (Devlin et al. 2018, Liu et al. 2019, Conneau et al. 2019): encoders with norms after
their blocks and learned positions. They differ in the names of tensors, and in the row of the first position.

jina-reranker-v2 is an XLM-RoBERTa whose tensors have the names of the flash-attn package, with q, k and v in one.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class _Names:
    """Names of tensors, without `.weight` and `.bias`: in the model, then within a layer."""

    norm: str = "embeddings.LayerNorm"
    layer: str = "encoder.layer.{}"
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    attention_output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    output_norm: str = "output.LayerNorm"


_FLASH_NAMES = _Names(
    "emb_ln", "encoder.layers.{}", ("mixer.Wqkv",), "mixer.out_proj", "norm1", "mlp.fc1", "mlp.fc2", "norm2"
)


def build(config: ModelConfig) -> Graph:
    """Return the graph of a BertModel or BertForSequenceClassification."""
    return _encoder(config, "bert", _Names(), first_position=0)


def build_roberta(config: ModelConfig) -> Graph:
    """Return the graph of a RobertaModel, an XLMRobertaModel, or their ...ForSequenceClassification.

    Positions are counted from the row after that of padding, so that as many rows less are left for tokens.
    """
    config.restrict("lora_adaptations")
    names = _Names() if config.fields.get("use_flash_attn") is None else _FLASH_NAMES
    return _encoder(config, "roberta", names, first_position=config.get("pad_token_id", 1) + 1)


def classifier(config: ModelConfig) -> Classifier:
    """Return the head of a BertForSequenceClassification: the pooler and a linear layer."""
    hidden = config.size("hidden_size")
    pooler = HeadLinear("bert.pooler.dense", hidden, activation="tanh")
    return Classifier("cls", (pooler, HeadLinear("classifier", num_labels(config))))


def roberta_classifier(config: ModelConfig) -> Classifier:
    """Return the head of a RobertaForSequenceClassification or an XLMRobertaForSequenceClassification."""
    dense = HeadLinear("classifier.dense", config.size("hidden_size"), activation="tanh")
    return Classifier("cls", (dense, HeadLinear("classifier.out_proj", num_labels(config))))


def _encoder(config: ModelConfig, prefix: str, names: _Names, first_position: int) -> Graph:
    config.restrict("position_embedding_type", ("absolute",))
    config.restrict("is_decoder", (False,))
    config.restrict("add_cross_attention", (False,))
    config = config.with_defaults(max_position_embeddings=512)
    hidden, inner, vocab = (config.size(name) for name in ("hidden_size", "intermediate_size", "vocab_size"))
    num_heads, epsilon = config.size("num_attention_heads"), config.get("layer_norm_eps", 1e-12)
    if hidden % num_heads:
        raise ModelError(f"config.json: hidden_size ({hidden}) must be a multiple of num_attention_heads ({num_heads})")
    positions = config.size("max_position_embeddings") - first_position
    if first_position < 0 or positions < 1:
        raise ModelError(f"config.json: pad_token_id leaves {positions} of max_position_embeddings; it must leave some")
    heads = Heads(num_heads, num_heads, hidden // num_heads)
    activation = activation_of(config, "hidden_act", "gelu")

    def norm(name: str) -> Norm:
        return Norm(f"{prefix}.{name}.weight", epsilon, f"{prefix}.{name}.bias", center=True)

    def linear(name: str, outputs: int) -> Linear:
        return Linear(f"{prefix}.{name}.weight", outputs, f"{prefix}.{name}.bias")

    residuals = []
    for i in range(config.size("num_hidden_layers")):
        layer = names.layer.format(i)
        projections = tuple(linear(f"{layer}.{name}", 3 * hidden // len(names.qkv)) for name in names.qkv)
        output = linear(f"{layer}.{names.attention_output}", hidden)
        attention = Attention(projections, output, heads, bidirectional=True)
        up, down = linear(f"{layer}.{names.up}", inner), linear(f"{layer}.{names.down}", hidden)
        residuals.append(Residual(attention, None, around=norm(f"{layer}.{names.attention_norm}")))
        feed_forward = FeedForward(up, down, activation)
        residuals.append(Residual(feed_forward, None, around=norm(f"{layer}.{names.output_norm}")))
    tables = f"{prefix}.embeddings"
    embedding = Embedding(
        f"{tables}.word_embeddings.weight", vocab, hidden, positions=f"{tables}.position_embeddings.weight",
        num_positions=positions, first_position=first_position, types=f"{tables}.token_type_embeddings.weight",
        num_types=config.size("type_vocab_size", 2), norm=norm(names.norm),
    )  # fmt: skip
    return Graph(embedding, tuple(residuals), HiddenStates(None))
