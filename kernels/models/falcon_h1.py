"""Falcon-H1, class FalconH1ForCausalLM: attention and a Mamba 2 layer side by side, and multipliers everywhere."""

from __future__ import annotations

from dataclasses import replace

from quire.kernels.activations import ScaledActivation
from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import (
    Attention,
    Embedding,
    FeedForward,
    Graph,
    Linear,
    Logits,
    Norm,
    Parallel,
    Residual,
    StateSpace,
)
from quire.kernels.models.decoder import activation_of, head_of, heads_of
from quire.kernels.models.mamba import mamba_heads, state_space, with_time_limits
from quire.kernels.rope import Rope


def build(config: ModelConfig) -> Graph:
    """Return the graph of a FalconH1ForCausalLM."""
    config = config.with_defaults(num_key_value_heads=8, max_position_embeddings=8192)
    hidden, epsilon = config.size("hidden_size"), config.get("rms_norm_eps", 1e-5)
    rope = Rope.from_config(config, heads_of(config).dim)
    scales = _scale(config, "ssm_out_multiplier"), _attention_scale(config)
    residuals = []
    for layer in range(config.size("num_hidden_layers")):
        at = f"model.layers.{layer}"
        mixers = Parallel((_mamba(config, f"{at}.mamba"), _attention(config, f"{at}.self_attn", rope)), scales)
        residuals.append(Residual(mixers, Norm(f"{at}.input_layernorm.weight", epsilon)))
        feed_forward, scale = _feed_forward(config, f"{at}.feed_forward")
        residuals.append(Residual(feed_forward, Norm(f"{at}.pre_ff_layernorm.weight", epsilon), multiplier=scale))
    embedding = Embedding(
        "model.embed_tokens.weight", config.size("vocab_size"), hidden, _scale(config, "embedding_multiplier")
    )
    norm = Norm("model.final_layernorm.weight", epsilon)
    logits = Logits(norm, head_of(config, embedding, tied=False), _scale(config, "lm_head_multiplier"))
    return Graph(embedding, tuple(residuals), logits)


def _scale(config: ModelConfig, name: str) -> float:
    return config.positive(name, 1.0)


def _scales(config: ModelConfig, name: str, count: int) -> list[float]:
    """Return the field `name`, a list of so many multipliers, 1 by default. Raises ModelError."""
    given = config.fields.get(name)
    values = [1.0] * count if given is None else given
    if not isinstance(values, list) or len(values) != count:
        raise ModelError(f"config.json: {name} is {values!r}; it must be a list of {count} numbers above 0")
    return [ModelConfig({name: value}).positive(name) for value in values]


def _mamba(config: ModelConfig, at: str) -> StateSpace:
    hidden = config.size("hidden_size")
    given = config.fields.get("mamba_d_ssm", 1024)
    heads = mamba_heads(
        config, config.size("mamba_expand", 2) * hidden if given is None else config.size("mamba_d_ssm", 1024)
    )
    bias, inner = config.get("mamba_proj_bias", False), _scale(config, "ssm_in_multiplier")
    if bias:
        config.restrict("ssm_in_multiplier", (1.0,))
    gate, value, key, query, time = (inner * scale for scale in _scales(config, "ssm_multipliers", 5))
    layer = state_space(
        at, heads, config.size("mamba_d_conv", 4), hidden, activation=activation_of(config, "hidden_act", "silu"),
        conv_bias=config.get("mamba_conv_bias", True), bias=bias, output_bias=config.get("projectors_bias", False),
    )  # fmt: skip
    if (value, key, query) != (1.0, 1.0, 1.0):
        columns = heads.value_columns, heads.key_columns, heads.key_columns
        scales = tuple(zip(columns, (value, key, query), strict=True))
        layer = replace(layer, convolution=replace(layer.convolution, scales=scales))
    if config.get("mamba_rms_norm", False):
        norm = Norm(f"{at}.norm.weight", config.get("rms_norm_eps", 1e-5))
        gate_first = not config.get("mamba_norm_before_gate", True)
        layer = replace(layer, norm=norm, norm_groups=heads.keys, gate_first=gate_first)
    layer = replace(layer, gate_scale=gate, time_scale=time)
    return with_time_limits(layer, config.fields.get("time_step_limit"))


def _attention(config: ModelConfig, at: str, rope: Rope) -> Attention:
    heads, bias = heads_of(config), config.get("attention_bias", False)
    if bias:
        for name in ("attention_in_multiplier", "key_multiplier"):
            config.restrict(name, (1.0,))

    def linear(name: str, outputs: int) -> Linear:
        return Linear(f"{at}.{name}_proj.weight", outputs, f"{at}.{name}_proj.bias" if bias else "")

    sizes = {"q": heads.query * heads.dim, "k": heads.kv * heads.dim, "v": heads.kv * heads.dim}
    scale = _scale(config, "attention_in_multiplier") ** 2 * _scale(config, "key_multiplier") / heads.dim**0.5
    return Attention(
        tuple(linear(name, size) for name, size in sizes.items()), linear("o", config.size("hidden_size")), heads,
        rotary=rope, scale=scale,
    )  # fmt: skip


def _attention_scale(config: ModelConfig) -> float:
    """Return the multiplier of attention's output: its own one, and that of its values."""
    outer, inner = _scale(config, "attention_out_multiplier"), _scale(config, "attention_in_multiplier")
    return outer * inner


def _feed_forward(config: ModelConfig, at: str) -> tuple[FeedForward, float]:
    """Return the feed-forward layer of a layer and the multiplier of its output."""
    inner, bias = config.size("intermediate_size"), config.get("mlp_bias", False)
    gate_scale, scale = _scales(config, "mlp_multipliers", 2)

    def linear(name: str, outputs: int) -> Linear:
        return Linear(f"{at}.{name}_proj.weight", outputs, f"{at}.{name}_proj.bias" if bias else "")

    activation = activation_of(config, "hidden_act", "silu")
    layer = FeedForward(
        linear("up", inner), linear("down", config.size("hidden_size")),
        activation if gate_scale == 1 else ScaledActivation(activation, gate_scale), linear("gate", inner),
    )  # fmt: skip
    return layer, scale
