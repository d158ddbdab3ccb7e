"""Draft heads: EAGLE (arXiv 2401.15077) and EAGLE-3 (2503.01840), as published for Llama and others.

An EAGLE-3 head with `contemplates` in its config has a lookahead token, as ConFu does (2603.08899): the model computes
the head's LOOKAHEAD_EMBEDDING in the place of the first draft, and the hidden states of that row are features too.

A head has a layer or a few, which read hidden states of the model that it drafts for beside the next tokens. Its files
lack what it shares with that model: always with EAGLE the embedding and the layer of the logits, and with EAGLE-3 maybe
the embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import (
    Attention,
    DraftInput,
    Embedding,
    EmbeddingInput,
    Features,
    Graph,
    Linear,
    Logits,
    Residual,
)
from quire.kernels.models.decoder import Layers, Variant

EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator")
EAGLE = ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM", "EagleModel")
METHODS = {**dict.fromkeys(EAGLE3, "eagle3"), **dict.fromkeys(EAGLE, "eagle")}
"""Methods by the class names of their heads; a head that says it is a LlamaForCausalLM is what the user says."""

LOOKAHEAD_EMBEDDING = "model.contemplate.weight"
"""The embedding [1, hidden_size of the model] of the lookahead token, which ConFu calls contemplate token."""

_PLAIN = "LlamaForCausalLM"


@dataclass(frozen=True)
class DraftedModel:
    """The model that a head drafts for: its size, and the tensors that heads may share."""

    hidden_size: int
    num_layers: int
    embedding: str
    logits: Logits


def head_config(fields: dict[str, Any]) -> ModelConfig:
    """Return the configuration of a head; that of `speculators` has its layers in an object of their own."""
    layer = ModelConfig(fields).options("transformer_layer_config")
    if "speculators_model_type" in fields:
        fields = {"norm_before_residual": True, **fields}
    return ModelConfig({**layer, **fields})


def method_of(config: ModelConfig) -> str | None:
    """Return the method that a head's class belongs to, None if it only names the class of a model."""
    name = config.architecture
    if name != _PLAIN and name not in METHODS:
        raise ModelError(f"the architecture {name!r} is not supported; supported are {', '.join(METHODS)}")
    return METHODS.get(name)


def features_of(config: ModelConfig, method: str, target: DraftedModel) -> Features:
    """Return the hidden states that a head reads."""
    if method == "eagle":
        config.restrict("contemplates", (False,))
        return Features(final=True)
    options = config.section("eagle_config")
    options.restrict("use_aux_hidden_state", (True,))
    name, last = "eagle_aux_hidden_state_layer_ids", target.num_layers
    layers = options.fields.get(name, config.fields.get(name))
    if layers is None:
        layers = [2, last // 2, last - 3]
        if len(set(layers)) < len(layers) or layers[-1] < 0:
            raise ModelError(f"config.json lacks {name}, and a model of {last} layers has no default for it: list some")
    is_list = isinstance(layers, list) and 0 < len(layers) <= last + 1
    if not is_list or any(type(layer) is not int or not 0 <= layer <= last for layer in layers):
        raise ModelError(f"config.json: {name} is {layers!r}; it must list layers of the model, from 0 to {last}")
    if len(set(layers)) < len(layers):
        raise ModelError(f"config.json: {name} is {layers!r}; it names a layer twice")
    return Features(tuple(layers), lookahead=config.get("contemplates", False))


def build_head(
    config: ModelConfig, method: str, target: DraftedModel, has: Callable[[str], bool]
) -> tuple[Graph, frozenset[str]]:
    """Return the graph of a head, and the tensors that it shares with its model.

    `has` tells whether the head's files have a tensor. Raises ModelError.
    """
    return (_build_eagle3 if method == "eagle3" else _build_eagle)(config, target, has)


def _variant(config: ModelConfig) -> Variant:
    config.restrict("pretraining_tp", (1,))
    bias = config.get("attention_bias", False)
    return Variant(qkv_bias=bias, output_bias=bias, mlp_bias=config.get("mlp_bias", False))


def _build_eagle3(
    config: ModelConfig, target: DraftedModel, has: Callable[[str], bool]
) -> tuple[Graph, frozenset[str]]:
    hidden, vocab = config.size("hidden_size"), config.size("vocab_size")
    own, features = "model.embed_tokens.weight", features_of(config, "eagle3", target)
    if not has(own) and hidden != target.hidden_size:
        raise ModelError(f"the draft head lacks {own}, and can't share that of a model of another hidden_size")
    embedding = Embedding(own if has(own) else target.embedding, vocab, hidden)
    first = "model.midlayer" if has("model.midlayer.self_attn.o_proj.weight") else "model.layers.0"
    layers = Layers(config, _variant(config), lambda number: first if number == 0 else f"model.layers.{number}")
    residuals = [_with_embedding(layers, first, hidden), layers.feed_forward(0)]
    for number in range(1, config.size("num_hidden_layers", 1)):
        residuals += [layers.attention(number), layers.feed_forward(number)]
    norm = layers.norm(f"{first}.hidden_norm")
    outputs = config.size("draft_vocab_size", vocab)
    draft_input = DraftInput(
        features, target.hidden_size, encode=Linear("model.fc.weight", hidden),
        norm=norm if config.get("norm_before_residual", False) else None,
    )  # fmt: skip
    if draft_input.norm is not None:
        residuals[0] = replace(residuals[0], before=None)
    offsets = "d2t" if outputs != vocab or has("d2t") else ""
    logits = Logits(
        layers.norm("model.norm"), Linear("lm_head.weight", outputs), config.get("logit_scale", 1.0), offsets=offsets
    )
    lent = frozenset[str]() if has(own) else frozenset({target.embedding})
    return Graph(embedding, tuple(residuals), logits, draft_input), lent


def _with_embedding(layers: Layers, first: str, hidden: int) -> Residual:
    """Return the first attention: its projections read the embeddings, then the hidden states."""
    residual = layers.attention(0)
    assert isinstance(residual.block, Attention)
    projections = residual.block.projections
    embedded = tuple(replace(layer, bias="", tensor_inputs=2 * hidden) for layer in projections)
    stated = tuple(replace(layer, first_input=hidden, tensor_inputs=2 * hidden) for layer in projections)
    block = replace(
        residual.block, projections=stated, embedded=EmbeddingInput(embedded, layers.norm(f"{first}.input_layernorm"))
    )
    return replace(residual, block=block, before=layers.norm(f"{first}.hidden_norm"))


def _build_eagle(config: ModelConfig, target: DraftedModel, has: Callable[[str], bool]) -> tuple[Graph, frozenset[str]]:
    """Build a head whose first layer has no norm before its attention, and which has no final one."""
    config.restrict("add_para_norm", (False,))
    hidden, vocab = config.size("hidden_size"), config.size("vocab_size")
    if hidden != target.hidden_size:
        raise ModelError(f"the draft head has hidden_size {hidden}; that of the model is {target.hidden_size}")
    layers = Layers(config, _variant(config))
    residuals: list[Residual] = []
    for number in range(config.size("num_hidden_layers", 1)):
        residuals += [layers.attention(number), layers.feed_forward(number)]
    residuals[0] = replace(residuals[0], before=None)
    combine = Linear("model.fc.weight", hidden, tensor_inputs=2 * hidden)
    draft_input = DraftInput(
        features_of(config, "eagle", target), hidden,
        combine=replace(combine, first_input=hidden, bias="model.fc.bias" if has("model.fc.bias") else ""),
        embedded=EmbeddingInput((combine,)),
    )  # fmt: skip
    logits = replace(target.logits, norm=None)
    graph = Graph(Embedding(target.embedding, vocab, hidden), tuple(residuals), logits, draft_input)
    return graph, frozenset({target.embedding, logits.linear.weight})
