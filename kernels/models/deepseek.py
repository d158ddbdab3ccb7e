"""DeepSeek-V2, V2-Lite, V3 and R1: multi-head latent attention (arXiv 2405.04434, 2412.19437); and GLM-4.7-Flash."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from quire.kernels.attention_heads import LatentHeads
from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import (
    Embedding,
    ExpertRouter,
    Experts,
    FeedForward,
    Graph,
    LatentAttention,
    Linear,
    Logits,
    Norm,
    Residual,
)
from quire.kernels.models.decoder import activation_of, head_of
from quire.kernels.models.experts import experts, feed_forward
from quire.kernels.rope import Rope

_LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latents, whatever `rms_norm_eps` is."""
_SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def build_v2(config: ModelConfig) -> Graph:
    """Return the graph of a DeepseekV2ForCausalLM."""
    config = config.with_defaults(
        **_SIZES, q_lora_rank=1536, n_routed_experts=64, n_shared_experts=2, moe_intermediate_size=1407,
        routed_scaling_factor=1.0,
    )  # fmt: skip
    return _LatentDecoder(config, interleaved=True, routing=_routing_of_v2).build()


def build_v3(config: ModelConfig) -> Graph:
    """Return the graph of a DeepseekV3ForCausalLM."""
    config = config.with_defaults(
        **_SIZES, q_lora_rank=1536, n_routed_experts=256, n_shared_experts=1, moe_intermediate_size=2048,
        routed_scaling_factor=2.5, num_experts_per_tok=8, n_group=8, topk_group=4, first_k_dense_replace=3,
        max_position_embeddings=4096,
    )  # fmt: skip
    return _LatentDecoder(config, interleaved=config.get("rope_interleave", True), routing=_routing_of_v3).build()


def build_glm4_moe_lite(config: ModelConfig) -> Graph:
    """Return the graph of a Glm4MoeLiteForCausalLM, which is as DeepSeek-V3."""
    config = config.with_defaults(
        qk_nope_head_dim=192, v_head_dim=256, kv_lora_rank=512, qk_rope_head_dim=64, q_lora_rank=768,
        n_routed_experts=64, n_shared_experts=1, moe_intermediate_size=1536, routed_scaling_factor=1.8,
        num_experts_per_tok=4, n_group=1, topk_group=1, first_k_dense_replace=1, rms_norm_eps=1e-5,
        max_position_embeddings=202752,
    )  # fmt: skip
    if types := config.strings("mlp_layer_types"):
        dense = list(types).count("dense")
        if len(types) != config.size("num_hidden_layers") or types != ("dense",) * dense + ("sparse",) * (
            len(types) - dense
        ):
            raise ModelError(
                f"config.json: {config.path}mlp_layer_types is {list(types)}; it must be dense for the first layers, "
                "and then sparse up to the last"
            )
        config = ModelConfig({**config.fields, "first_k_dense_replace": dense}, config.path)
    return _LatentDecoder(config, interleaved=config.get("rope_interleave", True), routing=_routing_of_v3).build()


def _routing_of_v2(config: ModelConfig, router: ExpertRouter) -> ExpertRouter:
    config.restrict("scoring_func", ("softmax",))
    normalize = config.get("norm_topk_prob", False)
    if normalize and router.scale != 1:
        raise ModelError(
            f"config.json: routed_scaling_factor is {router.scale} and norm_topk_prob is True, which implementations "
            "of DeepSeek-V2 understand in different ways; one of them must be left out"
        )
    router = replace(router, normalize=normalize)
    if config.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") == "greedy":
        return router
    return replace(router, groups=config.size("n_group"), top_groups=config.size("topk_group"))


def _routing_of_v3(config: ModelConfig, router: ExpertRouter) -> ExpertRouter:
    config.restrict("scoring_func", ("sigmoid",))
    config.restrict("topk_method", ("noaux_tc",))
    correction = f"{router.linear.weight.removesuffix('weight')}e_score_correction_bias"
    return replace(
        router, scoring="sigmoid", correction=correction, normalize=config.get("norm_topk_prob", True),
        groups=config.size("n_group"), top_groups=config.size("topk_group"), group_score="top2",
    )  # fmt: skip


class _LatentDecoder:
    """Builder of the residual blocks."""

    def __init__(
        self, config: ModelConfig, interleaved: bool, routing: Callable[[ModelConfig, ExpertRouter], ExpertRouter]
    ) -> None:
        self._config, self._routing = config, routing
        self._hidden = config.size("hidden_size")
        self._epsilon = config.get("rms_norm_eps", 1e-6)
        self._activation = activation_of(config, "hidden_act", "silu")
        sizes = ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
        self._heads = LatentHeads(*(config.size(name) for name in sizes))
        config.restrict("num_key_value_heads", (self._heads.query,))
        self._rotary = replace(Rope.from_config(config, self._heads.rope), interleaved=interleaved)
        self._scale = _attention_scale(self._rotary) / math.sqrt(self._heads.nope + self._heads.rope)
        self._compressed = 0 if config.fields.get("q_lora_rank") is None else config.size("q_lora_rank")
        self._bias = config.get("attention_bias", False)
        if self._bias and not self._compressed:
            raise ModelError("config.json: attention_bias is True, which is supported only with a q_lora_rank")

    def build(self) -> Graph:
        """Return the graph of the whole model."""
        embedding = Embedding("model.embed_tokens.weight", self._config.size("vocab_size"), self._hidden)
        residuals = [
            residual
            for layer in range(self._config.size("num_hidden_layers"))
            for residual in (self._attention(layer), self._feed_forward(layer))
        ]
        logits = Logits(self._norm("model.norm"), head_of(self._config, embedding, tied=False))
        return Graph(embedding, tuple(residuals), logits)

    def _norm(self, name: str) -> Norm:
        return Norm(f"{name}.weight", self._epsilon)

    def _attention(self, number: int) -> Residual:
        heads, at = self._heads, f"model.layers.{number}.self_attn"
        queries = heads.query * (heads.nope + heads.rope)

        def linear(name: str, outputs: int, bias: bool = False) -> Linear:
            return Linear(f"{at}.{name}.weight", outputs, f"{at}.{name}.bias" if bias else "")

        attention = LatentAttention(
            linear("q_b_proj" if self._compressed else "q_proj", queries),
            linear("kv_a_proj_with_mqa", heads.rank + heads.rope, self._bias),
            Norm(f"{at}.kv_a_layernorm.weight", _LATENT_EPSILON),
            linear("kv_b_proj", heads.query * heads.expanded),
            linear("o_proj", self._hidden, self._bias), heads, self._rotary, self._scale,
        )  # fmt: skip
        if self._compressed:
            norm = Norm(f"{at}.q_a_layernorm.weight", _LATENT_EPSILON)
            compress = linear("q_a_proj", self._compressed, self._bias)
            attention = replace(attention, compress=compress, query_norm=norm)
        return Residual(attention, self._norm(f"model.layers.{number}.input_layernorm"))

    def _feed_forward(self, number: int) -> Residual:
        if self._has_experts(number):
            block: Experts | FeedForward = self._experts(number)
        else:
            block = self._gated(f"model.layers.{number}.mlp", self._config.size("intermediate_size"))
        return Residual(block, self._norm(f"model.layers.{number}.post_attention_layernorm"))

    def _has_experts(self, number: int) -> bool:
        """Return whether a layer has experts; there are none if `n_routed_experts` is null."""
        config, dense = self._config, self._config.get("first_k_dense_replace", 0)
        sparse = config.fields.get("n_routed_experts") is not None
        return sparse and number >= dense and number % config.size("moe_layer_freq", 1) == 0

    def _experts(self, number: int) -> Experts:
        config = self._config
        count, inner = config.size("n_routed_experts"), config.size("moe_intermediate_size")
        block = experts(config, number, count, inner, self._activation, scale=config.positive("routed_scaling_factor"))
        block = replace(block, router=self._routing(config, block.router))
        if config.fields.get("n_shared_experts") is None:
            return block
        shared_inner = inner * config.size("n_shared_experts")
        return replace(block, shared=self._gated(f"model.layers.{number}.mlp.shared_experts", shared_inner))

    def _gated(self, at: str, inner: int) -> FeedForward:
        bias = self._config.get("mlp_bias", False)
        return feed_forward(at, self._hidden, inner, self._activation, bias=bias)


def _attention_scale(rope: Rope) -> float:
    """Return the square of YaRN's `mscale_all_dim`, by which scores are scaled; 1 without it."""
    if rope.kind == "default" or not rope.scaling.get("mscale_all_dim"):
        return 1.0
    factor, weight = rope.number("factor"), rope.number("mscale_all_dim")
    return (0.1 * weight * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0
