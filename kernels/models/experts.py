"""Mixtures of experts of decoders, whose tensors have the names of Qwen's and OLMoE's (weights/expert_tensors.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.kernels.activations import Activation
from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import ExpertRouter, Experts, FeedForward, Linear


def feed_forward(at: str, hidden: int, inner: int, activation: Activation, *, bias: bool = False) -> FeedForward:
    """Return the gated feed-forward layer of the module `at`."""

    def linear(name: str, outputs: int) -> Linear:
        return Linear(f"{at}.{name}_proj.weight", outputs, f"{at}.{name}_proj.bias" if bias else "")

    return FeedForward(linear("up", inner), linear("down", hidden), activation, linear("gate", inner))


def expert_layers(
    at: str, count: int, hidden: int, inner: int, activation: Activation, *, bias: bool = False
) -> tuple[FeedForward, ...]:
    """Return the experts of the module `at`."""
    return tuple(feed_forward(f"{at}.{number}", hidden, inner, activation, bias=bias) for number in range(count))


def experts(
    config: ModelConfig, layer: int, count: int, inner: int, activation: Activation, *, bias: bool = False,
    **routing: Any,
) -> Experts:  # fmt: skip
    """Return the `count` experts of a layer, each of `inner` hidden units; `routing` are fields of ExpertRouter.

    `bias`: the router and the experts have biases.
    """
    hidden, mlp = config.size("hidden_size"), f"model.layers.{layer}.mlp"
    router = ExpertRouter(
        Linear(f"{mlp}.gate.weight", count, f"{mlp}.gate.bias" if bias else ""), config.size("num_experts_per_tok")
    )
    layers = expert_layers(f"{mlp}.experts", count, hidden, inner, activation, bias=bias)
    return Experts(replace(router, **routing), layers)


def experts_beside_one(config: ModelConfig, layer: int, activation: str, *, normalize: bool) -> Experts:
    """Return the experts of a layer of a Qwen model with a shared one that has a gate. `normalize` is the default."""
    mlp, inner = f"model.layers.{layer}.mlp", config.size("shared_expert_intermediate_size")
    routed = experts(
        config, layer, config.size("num_experts"), config.size("moe_intermediate_size"), activation,
        normalize=config.get("norm_topk_prob", normalize),
    )  # fmt: skip
    shared = feed_forward(f"{mlp}.shared_expert", config.size("hidden_size"), inner, activation)
    return replace(routed, shared=shared, shared_gate=Linear(f"{mlp}.shared_expert_gate.weight", 1))


def is_sparse(config: ModelConfig, layer: int) -> bool:
    """Return whether a layer of a Qwen model has experts, by `mlp_only_layers` and `decoder_sparse_step`."""
    dense = config.fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(number) is int for number in dense):
        raise ModelError(f"config.json: mlp_only_layers is {dense!r}; it must be a list of layers' numbers")
    return layer not in dense and (layer + 1) % config.size("decoder_sparse_step", 1) == 0
