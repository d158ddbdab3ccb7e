"""Mamba 2 layers of hybrids, whose config and tensors have much in common."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from quire.kernels.attention_heads import StateHeads
from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Convolution, Linear, StateSpace


def mamba_heads(config: ModelConfig, columns: int) -> StateHeads:
    """Return the heads that the fields `mamba_...` describe, of so many value columns in all."""
    values = config.size("mamba_n_heads", 128)
    given = config.fields.get("mamba_d_head")
    dim = columns // values if given in (None, "auto") else config.size("mamba_d_head")
    if values * dim != columns:
        raise ModelError(
            f"config.json: mamba_n_heads ({values}) times mamba_d_head ({dim}) must be the width of the state's "
            f"values, {columns}"
        )
    return StateHeads(config.size("mamba_n_groups", 1), values, config.size("mamba_d_state", 256), dim)


def state_space(
    at: str, heads: StateHeads, taps: int, hidden: int, *, activation: str = "silu", conv_bias: bool = True,
    bias: bool = False, output_bias: bool = False,
) -> StateSpace:  # fmt: skip
    """Return the layer of the module `at`, without a norm."""

    def linear(name: str, outputs: int, bias: bool) -> Linear:
        return Linear(f"{at}.{name}.weight", outputs, f"{at}.{name}.bias" if bias else "")

    convolution = Convolution(
        f"{at}.conv1d.weight", heads.channels, taps, f"{at}.conv1d.bias" if conv_bias else "", activation
    )
    columns = heads.value_columns + heads.channels + heads.values
    return StateSpace(
        linear("in_proj", columns, bias), convolution, heads, f"{at}.A_log", f"{at}.dt_bias", f"{at}.D",
        linear("out_proj", hidden, output_bias),
    )  # fmt: skip


def with_time_limits(layer: StateSpace, limits: Any) -> StateSpace:
    """Return the layer with the `time_step_limit` of config.json, which may be missing. Raises ModelError."""
    if limits is None:
        return layer
    if not isinstance(limits, list) or len(limits) != 2:
        raise ModelError(f"config.json: time_step_limit is {limits!r}; it must be a list of two numbers")
    least, most = (math.inf if limit in ({"__float__": "Infinity"}, "Infinity") else limit for limit in limits)
    if not all(type(limit) in (int, float) for limit in (least, most)) or not 0 <= least < most:
        raise ModelError(
            f"config.json: time_step_limit is {limits!r}; it must be two numbers from 0 on, the lower first"
        )
    return replace(layer, least=float(least), most=0.0 if math.isinf(most) else float(most))
