"""Gemma 3n, class Gemma3nForCausalLM (Google 2025), and the text part of Gemma3nForConditionalGeneration.

As Gemma 4 in per-layer inputs, layers that read the keys and values of others, and norms; as Gemma 3 in its rotary
embeddings. Tokens have several streams of hidden states, of which each layer reads one (AltUp), attention has a
low-rank branch beside it (LAuReL), and the activations of the first feed-forward layers are sparse (Gaussian top-k).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import NormalDist

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import (
    Attention,
    Embedding,
    FeedForward,
    Graph,
    HeadNorms,
    Laurel,
    Linear,
    Logits,
    Norm,
    PerLayerInput,
    Residual,
    StreamCorrection,
    StreamPrediction,
    StreamRouter,
    Streams,
)
from quire.kernels.models.decoder import activation_of, head_of, heads_of, sliding_layers, window_of
from quire.kernels.models.experts import feed_forward
from quire.kernels.models.gemma2 import ACTIVATION, softcap
from quire.kernels.models.gemma3 import rope_of_layers
from quire.kernels.models.gemma4 import kv_source, per_layer_inputs

_SPARSE_LAYERS, _SPARSITY = 10, 0.95


def build(config: ModelConfig) -> Graph:
    """Return the graph of a Gemma3nForCausalLM."""
    config = config.with_defaults(
        vocab_size=262400, hidden_size=2048, intermediate_size=16384, num_hidden_layers=35, num_attention_heads=8,
        num_key_value_heads=2, head_dim=256, max_position_embeddings=32768, sliding_window=512,
        tie_word_embeddings=True, final_logit_softcapping=30.0, vocab_size_per_layer_input=262144,
        hidden_size_per_layer_input=256, altup_num_inputs=4, num_kv_shared_layers=15, laurel_rank=64,
    )  # fmt: skip
    config.restrict("altup_active_idx", (0,))
    return _Gemma3n(config).build()


class _Gemma3n:
    """Builder of the graph."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._hidden, self._layers = config.size("hidden_size"), config.size("num_hidden_layers")
        self._epsilon = config.get("rms_norm_eps", 1e-6)
        self._activation = activation_of(config, *ACTIVATION)
        self._heads, self._bias = heads_of(config), config.get("attention_bias", False)
        self._sliding = sliding_layers(config, 5)
        self._kinds = ["sliding_attention" if sliding else "full_attention" for sliding in self._sliding]
        self._ropes = {kind: rope_of_layers(config, kind) for kind in sorted(set(self._kinds))}
        self._inner, self._sparsity = _inner_sizes(config, self._layers), _sparsity(config, self._layers)
        self._streams = config.size("altup_num_inputs")

    def build(self) -> Graph:
        """Return the graph of the whole model."""
        config, vocab = self._config, self._config.size("vocab_size")
        embedding = Embedding("model.embed_tokens.weight", vocab, self._hidden, math.sqrt(self._hidden))
        residuals = [residual for layer in range(self._layers) for residual in self._residuals(layer)]
        head, cap = head_of(config, embedding, tied=True), softcap(config, "final_logit_softcapping")
        logits = Logits(self._norm("model.norm"), head, softcap=cap)
        inputs = per_layer_inputs(config, self._epsilon, first_for_others=True)
        expand, contract = (
            tuple(Linear(f"model.{name}.{number}.weight", self._hidden) for number in range(self._streams - 1))
            for name in ("altup_projections", "altup_unembed_projections")
        )
        streams = Streams(expand, contract, tuple(self._around(layer) for layer in range(self._layers)))
        return Graph(embedding, tuple(residuals), logits, per_layer_inputs=inputs, streams=streams)

    def _around(self, number: int) -> tuple[StreamPrediction, StreamCorrection]:
        """Return what is around a layer."""
        config, at = self._config, f"model.layers.{number}"
        router = StreamRouter(
            self._norm(f"{at}.altup.router_norm"), Linear(f"{at}.altup.modality_router.weight", self._streams),
            1 / self._hidden,
        )  # fmt: skip
        gate = Linear(f"{at}.per_layer_input_gate.weight", config.size("hidden_size_per_layer_input"))
        project = Linear(f"{at}.per_layer_projection.weight", self._hidden)
        scales = f"{at}.altup.correct_output_scale" if config.get("altup_correct_scale", True) else ""
        correction = StreamCorrection(
            router, Linear(f"{at}.altup.correction_coefs.weight", self._streams), scales,
            PerLayerInput(gate, project, self._activation, number), self._norm(f"{at}.post_per_layer_input_norm"),
        )  # fmt: skip
        coefficients = Linear(f"{at}.altup.prediction_coefs.weight", self._streams**2)
        return StreamPrediction(router, coefficients), correction

    def _residuals(self, number: int) -> Iterator[Residual]:
        """Yield the residual blocks of a layer."""
        at, rank = f"model.layers.{number}", self._config.size("laurel_rank")
        laurel = Laurel(
            Linear(f"{at}.laurel.linear_left.weight", rank), Linear(f"{at}.laurel.linear_right.weight", self._hidden),
            self._norm(f"{at}.laurel.post_laurel_norm"), math.sqrt(0.5),
        )  # fmt: skip
        before, after = self._norm(f"{at}.input_layernorm"), self._norm(f"{at}.post_attention_layernorm")
        yield Residual(self._attention(number), before, after, laurel=laurel)
        before, after = (self._norm(f"{at}.{name}_feedforward_layernorm") for name in ("pre", "post"))
        yield Residual(self._feed_forward(number), before, after)

    def _attention(self, number: int) -> Attention:
        heads, kind, at = self._heads, self._kinds[number], f"model.layers.{number}.self_attn"
        source = kv_source(self._config, self._kinds, number)
        sizes = {"q": heads.query * heads.dim, "k": heads.kv * heads.dim, "v": heads.kv * heads.dim}
        query, *others = (self._linear(f"{at}.{name}_proj", size) for name, size in sizes.items())
        return Attention(
            (query, *others) if source is None else (query,),
            self._linear(f"{at}.o_proj", self._hidden), heads, self._ropes[kind],
            HeadNorms(f"{at}.q_norm.weight", f"{at}.k_norm.weight", self._epsilon, values=True),
            window=window_of(self._config) if self._sliding[number] else 0, scale=1.0, kv_source=source,
            unread=() if source is None else tuple(others),
        )  # fmt: skip

    def _feed_forward(self, number: int) -> FeedForward:
        sparsity = self._sparsity[number]
        dense = feed_forward(f"model.layers.{number}.mlp", self._hidden, self._inner[number], self._activation)
        return replace(dense, cutoff=NormalDist().inv_cdf(sparsity)) if sparsity else dense

    def _norm(self, name: str) -> Norm:
        return Norm(f"{name}.weight", self._epsilon)

    def _linear(self, name: str, outputs: int) -> Linear:
        return Linear(f"{name}.weight", outputs, f"{name}.bias" if self._bias else "")


def _inner_sizes(config: ModelConfig, layers: int) -> list[int]:
    """Return the width of each feed-forward layer; config.json may have one for all."""
    name = "intermediate_size"
    given = config.fields.get(name)
    if not isinstance(given, list):
        return [config.size(name)] * layers
    if len(given) != layers:
        raise ModelError(f"config.json: {config.path}{name} has {len(given)} entries; it must have {layers}")
    return [ModelConfig({**config.fields, name: entry}, config.path).size(name) for entry in given]


def _sparsity(config: ModelConfig, layers: int) -> list[float]:
    """Return for each layer the part of its gates that are 0, were they distributed normally; 0: all are used."""
    name = "activation_sparsity_pattern"
    given = config.fields.get(name)
    if given is None:
        count = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
        return [_SPARSITY] * count + [0.0] * (layers - count)
    if not isinstance(given, list) or len(given) != layers or not all(_is_part(entry) for entry in given):
        raise ModelError(
            f"config.json: {config.path}{name} is {repr(given)[:200]}; it must list a number from 0 to below 1 for "
            f"each of the {layers} layers"
        )
    return [float(entry) for entry in given]


def _is_part(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < 1  # type: ignore[operator]
