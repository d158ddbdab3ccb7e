"""The metadata and tensors that llama.cpp's converters make of a model folder, by their rules, written down anew.

Sources: `conversion/` and `gguf-py/` in llama.cpp's repository. Names of tensors come from the `gguf` package.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np

Config = dict[str, Any]
Keys = dict[str, Any]
Named = Iterator[tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Conversion:
    """How a class of `transformers` is converted: the architecture, keys besides the common ones, and changed tensors.

    `change(config, name, values)` yields tensors under names that the `gguf` package knows. `arrays(config, tensors)`
    are keys without the name of the architecture, made of tensors.
    """

    architecture: str
    keys: Callable[[Config], Keys] = lambda config: {}
    change: Callable[[Config, str, np.ndarray], Named] = lambda config, name, values: iter([(name, values)])
    extra: Callable[[Config], Named] = lambda config: iter([])
    arrays: Callable[[Config, dict[str, np.ndarray]], Keys] = lambda config, tensors: {}


_PREDICTING = {
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm",
}  # fmt: skip
_NEXTN = {
    "eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "shared_head_norm",
    "shared_head.head": "shared_head_head", "embed_tokens": "embed_tokens",
}  # fmt: skip


def predicted_layers(config: Config) -> int:
    """Return the layers for multi-token prediction that the converter writes; it leaves out those of DeepSeek."""
    names = {"glm4_moe": "num_nextn_predict_layers", "glm4_moe_lite": "num_nextn_predict_layers"}
    return int(config.get(names.get(config.get("model_type", ""), "mtp_num_hidden_layers")) or 0)


def _predicting_name(config: Config, name: str) -> str:
    """Return the name of a tensor of Qwen's heads as that of the layer after the others."""
    layer, (head, _, rest) = f"model.layers.{config.get('num_hidden_layers')}", name.partition(".")
    if head != "mtp":
        return name
    module, _, end = rest.partition(".")
    return f"{layer}.{end.removeprefix('0.')}" if module == "layers" else f"{layer}.{_PREDICTING[module]}.{end}"


def _nextn_name(config: Config, name: str) -> str | None:
    """Return the name in the file of what only layers for multi-token prediction have, which `gguf` may not know."""
    number = config.get("num_hidden_layers")
    module, _, kind = name.removeprefix(f"model.layers.{number}.").rpartition(".")
    return f"blk.{number}.nextn.{_NEXTN[module]}.{kind}" if module in _NEXTN else None


def first(config: Config, *names: str) -> Any:
    """Return the first of some fields that is there, or else None."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def rope_of(config: Config) -> Config:
    """Return the parameters of RoPE; those of full attention where layers differ."""
    rope: Config = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})
    }  # fmt: skip
    return dict(rope.get("full_attention", rope))


def common_keys(config: Config) -> Keys:
    """Return the keys that converters write for every model."""
    rope = rope_of(config)
    keys = {
        "block_count": (first(config, "num_hidden_layers", "n_layer") or len(config["layers_block_type"]))
        + predicted_layers(config),
        "nextn_predict_layers": predicted_layers(config) or None,
        "context_length": first(config, "max_position_embeddings", "n_positions"),
        "embedding_length": first(config, "hidden_size", "n_embd"),
        "feed_forward_length": first(config, "intermediate_size", "n_inner"),
        "attention.head_count": first(config, "num_attention_heads", "n_head"),
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "rope.freq_base": rope.get("rope_theta"),
        "attention.layer_norm_rms_epsilon": first(config, "rms_norm_eps", "norm_eps"),
        "attention.layer_norm_epsilon": first(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "expert_count": first(config, "num_local_experts", "num_experts", "n_routed_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
    }
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": rope["factor"]}
    if kind == "longrope":
        keys["rope.scaling.type"] = kind
    if kind == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        keys |= {f"rope.scaling.yarn_{name}": rope.get(name) for name in ("beta_fast", "beta_slow")}
        keys["rope.scaling.yarn_attn_factor"] = rope.get("attention_factor")
    return {name: value for name, value in keys.items() if value is not None}


def _head_size(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _llama_keys(config: Config) -> Keys:
    return {"vocab_size": config["vocab_size"], "rope.dimension_count": _head_size(config)}


def _permuted(config: Config, name: str, values: np.ndarray) -> Named:
    """Put row j of the second half of each head of q and k after row j of the first half."""
    layer = name.split(".")[-2]
    if layer in ("q_proj", "k_proj"):
        count = config["num_attention_heads" if layer == "q_proj" else "num_key_value_heads"]
        values = values.reshape(count, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    yield name, values


def _llama3_factors(config: Config) -> Named:
    rope = rope_of(config)
    if rope.get("rope_type") != "llama3":
        return
    dim, old = _head_size(config), rope["original_max_position_embeddings"]
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / dim)
        if wavelength < old / rope["high_freq_factor"]:
            factors.append(1.0)
        elif wavelength > old / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    yield "rope_freqs.weight", np.array(factors, np.float32)


def _granite_keys(config: Config) -> Keys:
    names = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
             "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}  # fmt: skip
    return _llama_keys(config) | {key: config[name] for key, name in names.items()}


def _plus_one(config: Config, name: str, values: np.ndarray) -> Named:
    if name == "lm_head.weight":
        return
    yield name, values + np.float32(1) if name.endswith("norm.weight") else values


def _gemma2_keys(config: Config) -> Keys:
    return {
        "attn_logit_softcapping": config["attn_logit_softcapping"], "rope.freq_base": None,
        "final_logit_softcapping": config["final_logit_softcapping"],
        "attention.sliding_window": config["sliding_window"],
    }  # fmt: skip


def _gemma3_keys(config: Config) -> Keys:
    local = (config.get("rope_parameters") or {}).get("sliding_attention", {}).get("rope_theta")
    return {"rope.freq_base_swa": local, "attention.sliding_window": config["sliding_window"]}


def _gemma3n_keys(config: Config) -> Keys:
    scales = [NormalDist().inv_cdf(part) if part else -math.inf for part in config["activation_sparsity_pattern"]]
    return _gemma3_keys(config) | {
        "altup.active_idx": config["altup_active_idx"],
        "altup.num_inputs": config["altup_num_inputs"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "activation_sparsity_scale": [float(np.float32(scale)) for scale in scales],
        "final_logit_softcapping": config["final_logit_softcapping"],
    }


def _gemma3n(config: Config, name: str, values: np.ndarray) -> Named:
    yield f"{name}.weight" if name.endswith("_scale") else name, values


def _gemma4_keys(config: Config) -> Keys:
    full = [kind == "full_attention" for kind in config["layer_types"]]
    by_layer, shared = config["per_layer_config"], config["num_kv_shared_layers"]
    head = by_layer[str(full.index(True))]
    kv = config["num_key_value_heads"], head.get("num_key_value_heads")
    window_rope, inner = config["rope_parameters"]["sliding_attention"], config["intermediate_size"]
    keys = {
        "rope.freq_base_swa": window_rope["rope_theta"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [not each for each in full],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"] or 0,
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "expert_used_count": config.get("top_k_experts"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
    }
    for suffix, dim in (("", head["head_dim"]), ("_swa", config["head_dim"])):
        names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
        keys |= {f"{name}{suffix}": dim for name in names}
    if kv[1] is not None:
        keys["attention.head_count_kv"] = [kv[each] for each in full]
    if config["use_double_wide_mlp"]:
        keys["feed_forward_length"] = [inner * (1 + (layer >= len(full) - shared)) for layer in range(len(full))]
    return keys


def _gemma4(config: Config, name: str, values: np.ndarray) -> Named:
    """Give tensors without an end one. Two of the router have names that the `gguf` package does not know."""
    router = {"router.scale": "router.proj.scale", "router.per_expert_scale": "experts.down_proj.scale"}
    for end, new in router.items():
        if name.endswith(end):
            name = name.replace(end, new)
    is_bare = name.endswith(("layer_scalar", "_proj")) and not name.endswith("router.proj")
    yield f"{name}.weight" if is_bare else name, values


def _gemma4_factors(config: Config) -> Named:
    """Divide the frequencies of what is not rotated by so much that no angle is left."""
    full = config["layer_types"].index("full_attention")
    half = config["per_layer_config"][str(full)]["head_dim"] // 2
    rotated = int(half * rope_of(config)["partial_rotary_factor"])
    yield "rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (half - rotated), np.float32)


def _embedding_gemma(config: Config, name: str, values: np.ndarray) -> Named:
    yield from _plus_one(config, f"model.{name}", values)


def _phi3_keys(config: Config) -> Keys:
    rope, length = rope_of(config), config["max_position_embeddings"]
    original = config.get("original_max_position_embeddings") or length
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    keys = {
        "rope.scaling.original_context_length": original,
        "attention.sliding_window": config.get("sliding_window") or 0,
        "rope.dimension_count": int(part * config["hidden_size"]) // config["num_attention_heads"],
    }
    if rope.get("rope_type") == "longrope":
        scale = length / original
        keys["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    return keys


def _phi3_factors(config: Config) -> Named:
    for kind in ("long", "short"):
        if factors := rope_of(config).get(f"{kind}_factor"):
            yield f"rope_factors_{kind}.weight", np.array(factors, np.float32)


def _glm4_keys(config: Config) -> Keys:
    return {"rope.dimension_count": int(_head_size(config) * rope_of(config).get("partial_rotary_factor", 0.5))}


def _cohere2_keys(config: Config) -> Keys:
    return {
        "logit_scale": config["logit_scale"], "attention.sliding_window": config["sliding_window"],
        "vocab_size": config["vocab_size"], "rope.scaling.type": "none",
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
    }  # fmt: skip


def _gpt2_keys(config: Config) -> Keys:
    return {"feed_forward_length": 4 * config["n_embd"]}


def _gpt2(config: Config, name: str, values: np.ndarray) -> Named:
    if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        values = values.T
    if not name.endswith((".attn.bias", ".attn.masked_bias")):
        yield name, values


def _bert_keys(config: Config) -> Keys:
    return {"attention.causal": False, "rope.freq_base": None}


def _bert(config: Config, name: str, values: np.ndarray) -> Named:
    name = name.removeprefix("bert.")
    if not name.startswith(("pooler.", "embeddings.position_ids")):
        yield name, values


def _roberta_keys(config: Config) -> Keys:
    return _bert_keys(config) | {"context_length": config["max_position_embeddings"] - config["pad_token_id"] - 1}


def _roberta(config: Config, name: str, values: np.ndarray) -> Named:
    name = name.removeprefix("roberta.")
    if name == "embeddings.position_embeddings.weight":
        values = values[config["pad_token_id"] + 1 :]
    if not name.startswith("pooler."):
        yield name, values


def _nomic_keys(config: Config) -> Keys:
    return {"attention.causal": False}


_EXPERT = re.compile(r"\w+(\.layers\.\d+)\.(?:mlp|block_sparse_moe|feed_forward|mixer)\.experts\.(\d+)\.(\w+)\.weight")
_STREAM = re.compile(r"(model\.altup_(?:unembed_)?projections)\.(\d+)\.weight")
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors with the experts of each layer as one [experts, outputs, inputs], and so layers of streams."""
    result: dict[str, np.ndarray] = {}
    parts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        if (stream := _STREAM.fullmatch(name)) is not None:
            parts.setdefault(f"{stream[1]}.weight", {})[int(stream[2])] = values
            continue
        match = _EXPERT.fullmatch(name)
        if match is None:
            result[name] = values
            continue
        layer, number, part = match.groups()
        parts.setdefault(f"model{layer}.mlp.experts.{_MIXTRAL.get(part, part)}.weight", {})[int(number)] = values
    return result | {name: np.stack([each[i] for i in range(len(each))]) for name, each in parts.items()}


def _expert_keys(config: Config) -> Keys:
    return {
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }


def _gpt_oss_keys(config: Config) -> Keys:
    return {
        "attention.sliding_window": config["sliding_window"],
        "expert_feed_forward_length": config["intermediate_size"],
    }


def _gpt_oss(config: Config, name: str, values: np.ndarray) -> Named:
    """Divide gates and ups, which take turns, and transpose the experts."""
    module = name.removesuffix("_bias").rsplit(".", 1)[0]
    kind = "bias" if name.endswith("_bias") else "weight"
    if ".experts." not in name:
        yield f"{name}.weight" if name.endswith("sinks") else name, values
        return
    values = values if kind == "bias" else values.swapaxes(1, 2)
    if "gate_up_proj" not in name:
        yield f"{module}.down_proj.{kind}", values
        return
    for i, part in enumerate(("gate", "up")):
        yield f"{module}.{part}_proj.{kind}", values[:, i::2]


def _deepseek_keys(config: Config) -> Keys:
    rope, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    scale = rope_of(config).get("mscale_all_dim")
    return {
        "attention.head_count_kv": 1, "attention.q_lora_rank": config.get("q_lora_rank"),
        "attention.kv_lora_rank": rank, "attention.key_length": rank + rope, "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": config["v_head_dim"], "rope.dimension_count": rope,
        "rope.scaling.yarn_log_multiplier": None if scale is None else 0.1 * scale,
        "leading_dense_block_count": config.get("first_k_dense_replace", 0),
        "expert_shared_count": config["n_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"], "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"), "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"] or None,
        "expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else None,
    }  # fmt: skip


def _corrected(config: Config, name: str, values: np.ndarray) -> Named:
    yield name.replace("e_score_correction_bias", "e_score_correction.bias"), values


def _deepseek(config: Config, name: str, values: np.ndarray) -> Named:
    """Divide the layer that expands latents, and transpose its part for keys."""
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if not name.endswith(".kv_b_proj.weight"):
        yield name, values
        return
    size = config["qk_nope_head_dim"]
    heads = values.reshape(-1, size + config["v_head_dim"], values.shape[1])
    yield name.replace("kv_b_proj", "k_b_proj"), heads[:, :size].swapaxes(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), heads[:, size:]


def _vectors_of(config: Config, name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """Return a tensor of a layer with a state as it is stored: rates, not their logarithms, and taps as a matrix.

    The exponentials are rounded once, as ours, where torch computes them in f32; most have the same bits.
    """
    if name.endswith(".A_log"):
        values = -np.exp(values.astype(np.float64)).astype(np.float32)
    if name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    if name.endswith((".conv1d.weight", ".conv.conv.weight")):
        values = values.squeeze(1)
    return name, values


def _mamba(config: Config, name: str, values: np.ndarray, groups: int) -> tuple[str, np.ndarray]:
    """Return a tensor of a Mamba 2 layer."""
    name, values = _vectors_of(config, name, values)
    if name.endswith((".A_log", ".D")):
        values = values.reshape(-1, 1)
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        values = values.reshape(groups, -1)
    return name, values


def _heads_by_layer(config: Config) -> list[int]:
    """Return the KV heads of each layer."""
    kinds = config.get("layer_types") or config["layers_block_type"]
    return [config["num_key_value_heads"] if kind in ("attention", "full_attention") else 0 for kind in kinds]


def _lfm2_keys(config: Config) -> Keys:
    inner = config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim"):
        inner = int(config["block_ffn_dim_multiplier"] * (2 * inner // 3))
        inner = -(-inner // config["block_multiple_of"]) * config["block_multiple_of"]
    return {
        "attention.head_count_kv": _heads_by_layer(config), "shortconv.l_cache": config["conv_L_cache"],
        "feed_forward_length": inner, "vocab_size": config["vocab_size"],
    }  # fmt: skip


def _lfm2_moe_keys(config: Config) -> Keys:
    return _lfm2_keys(config) | {
        "expert_feed_forward_length": config["moe_intermediate_size"], "expert_gating_func": 2,
        "leading_dense_block_count": config["num_dense_layers"],
    }  # fmt: skip


def _lfm2(config: Config, name: str, values: np.ndarray) -> Named:
    name, values = _vectors_of(config, name, values)
    yield name.replace(".expert_bias", ".expert_bias.bias"), values


def _qwen3_next_keys(config: Config) -> Keys:
    part = rope_of(config).get("partial_rotary_factor", 0.25)
    return _expert_keys(config) | {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"], "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"], "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config["layer_types"]],
        "full_attention_interval": 4, "rope.dimension_count": int(_head_size(config) * part),
    }  # fmt: skip


def _qwen3_next(config: Config, name: str, values: np.ndarray) -> Named:
    """Add 1 to norms, and take the joint projections of key heads apart, but for that of the rates."""
    name, values = _vectors_of(config, name, values)
    if name.endswith("norm.weight") and not name.endswith(".linear_attn.norm.weight"):
        values = values + np.float32(1)
    if not name.endswith(".in_proj_qkvz.weight"):
        yield name, values
        return
    keys, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    heads = values.reshape(keys, 2 * key + 2 * value, -1)
    parts = np.split(heads, [key, 2 * key, 2 * key + value], axis=1)
    *mixed, gates = (part.reshape(-1, values.shape[1]) for part in parts)
    yield name.replace("in_proj_qkvz", "in_proj_qkv"), np.concatenate(mixed)
    yield name.replace("in_proj_qkvz", "in_proj_z"), gates


def _qwen35_keys(config: Config) -> Keys:
    sections = rope_of(config).get("mrope_section", [11, 11, 10])
    return _qwen3_next_keys(config) | {"rope.dimension_sections": [*sections, 0]}


def _qwen35(config: Config, name: str, values: np.ndarray) -> Named:
    """Put the value heads of a key head apart: the first of all key heads, then the second of all, and so on."""
    part = name.partition(".linear_attn.")[2].partition(".")[0]
    keys, size = config["linear_num_key_heads"], config["linear_value_head_dim"]
    first = 2 * keys * config["linear_key_head_dim"] if part in ("in_proj_qkv", "conv1d") else 0
    width = size if part in ("in_proj_qkv", "in_proj_z", "conv1d", "out_proj") else 1
    if part and part != "norm":
        axis = 1 if part == "out_proj" else 0
        kept, moved = np.split(values, [first], axis=axis)
        numbers = np.arange(moved.shape[axis]).reshape(keys, -1, width).swapaxes(0, 1).reshape(-1)
        values = np.concatenate([kept, moved.take(numbers, axis=axis)], axis=axis)
    yield from _qwen3_next(config, name, values)


def _granite_hybrid_keys(config: Config) -> Keys:
    """Return the keys; that of the converter for a model with RoPE, which it does not write, is left to tests."""
    return _granite_keys(config) | {
        "attention.key_length": None, "attention.value_length": None, "context_length": 1 << 20,
        "attention.head_count_kv": _heads_by_layer(config), "rope.scaling.finetuned": False,
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "ssm.conv_kernel": config["mamba_d_conv"], "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"], "ssm.time_step_rank": config["mamba_n_heads"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
    }  # fmt: skip


def _granite_hybrid(config: Config, name: str, values: np.ndarray) -> Named:
    """Divide gates and ups; a model without experts has its shared MLP under the names of others."""
    name, values = _mamba(config, name, values, config["mamba_n_groups"])
    layer, _, end = name.partition(".shared_mlp.")
    module = f"{layer}.mlp.shared_expert" if config["num_local_experts"] else f"{layer}.mlp"
    if name.endswith(".block_sparse_moe.input_linear.weight"):
        layer, end, module = name.partition(".block_sparse_moe.")[0], "input_linear.weight", ""
        module = f"{layer}.mlp.experts"
    if end == "input_linear.weight":
        for part, half in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
            yield f"{module}.{part}_proj.weight", half
    elif end:
        yield f"{module}.down_proj.weight", values
    else:
        yield from _permuted(config, name, values)


def _falcon_keys(config: Config) -> Keys:
    return {
        "vocab_size": config["vocab_size"], "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"], "ssm.group_count": config["mamba_n_groups"],
        "ssm.time_step_rank": config["mamba_n_heads"], "ssm.inner_size": config["mamba_d_ssm"],
    }  # fmt: skip


def _falcon(config: Config, name: str, values: np.ndarray) -> Named:
    """Multiply weights and biases by the multipliers."""
    name, values = _mamba(config, name, values, config["mamba_n_groups"])
    inner = config["attention_in_multiplier"]
    scales = {
        "gate_proj": config["mlp_multipliers"][0], "down_proj": config["mlp_multipliers"][1], "q_proj": inner,
        "k_proj": inner * config["key_multiplier"], "v_proj": inner, "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"], "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    module = name.split(".")[-2]
    if module == "in_proj":
        columns, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        counts = [columns, columns, keys, keys, config["mamba_n_heads"]]
        rows = np.repeat(np.array(config["ssm_multipliers"]) * config["ssm_in_multiplier"], counts)
        values = values * rows.astype(np.float32)[:, None]
    yield name, values * np.float32(scales.get(module, 1.0))


def _nemotron_keys(config: Config) -> Keys:
    with_experts, inner = bool(config.get("n_routed_experts")), config["intermediate_size"]
    inner = config["moe_intermediate_size"] if with_experts else inner
    keys = {
        "attention.head_count_kv": _heads_by_layer(config), "rope.scaling.finetuned": False, "context_length": 1 << 20,
        "feed_forward_length": [inner if kind in ("mlp", "moe") else 0 for kind in config["layers_block_type"]],
        "vocab_size": config["vocab_size"], "rope.dimension_count": config["head_dim"],
        "ssm.conv_kernel": config["conv_kernel"], "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"], "ssm.time_step_rank": config["mamba_num_heads"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
    }  # fmt: skip
    return keys if not with_experts else keys | {
        "expert_feed_forward_length": inner, "expert_shared_count": config["n_shared_experts"],
        "moe_latent_size": config.get("moe_latent_size"),
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_weights_norm": config["norm_topk_prob"], "expert_weights_scale": config["routed_scaling_factor"],
        "expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"],
    }  # fmt: skip


def _nemotron(config: Config, name: str, values: np.ndarray) -> Named:
    name, values = _mamba(config, name, values, config["n_groups"])
    yield from _permuted(config, name.replace("e_score_correction_bias", "e_score_correction.bias"), values)


def _window_keys(config: Config) -> Keys:
    """Return the keys of OLMo 3 and EXAONE 4.0."""
    if config.get("sliding_window") is None:
        return {}
    local = (config.get("rope_parameters") or {}).get("sliding_attention", {}).get("rope_theta")
    pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
    window = {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": pattern}
    return window | {"rope.freq_base_swa": local}


def _mistral3_keys(config: Config) -> Keys:
    rope = rope_of(config)
    return _llama_keys(config) | {
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def _hunyuan_keys(config: Config) -> Keys:
    rope, dim = rope_of(config), _head_size(config)
    if rope.get("rope_type") != "dynamic":
        return {}
    return {
        "rope.freq_base": rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2)), "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0, "rope.scaling.original_context_length": 262144, "context_length": 262144,
    }  # fmt: skip


def _apertus(config: Config, name: str, values: np.ndarray) -> Named:
    if ".act_fn." not in name:
        yield name, values


def _apertus_arrays(config: Config, tensors: dict[str, np.ndarray]) -> Keys:
    layers = range(config["num_hidden_layers"])
    return {
        f"xielu.{name}": [tensors[f"model.layers.{layer}.mlp.act_fn.{name}"].item() for layer in layers]
        for name in ("alpha_p", "alpha_n", "beta", "eps")
    }


def _ernie_moe_keys(config: Config) -> Keys:
    return {
        "expert_count": config["moe_num_experts"], "expert_used_count": config["moe_k"],
        "interleave_moe_layer_step": config["moe_layer_interval"],
        "leading_dense_block_count": config["moe_layer_start_index"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["moe_num_shared_experts"],
        "expert_shared_feed_forward_length": config["intermediate_size"] // config["num_key_value_heads"],
    }  # fmt: skip


def _glm4_moe_keys(config: Config) -> Keys:
    return _glm4_keys(config) | {
        "nextn_predict_layers": predicted_layers(config),
        "expert_feed_forward_length": config["moe_intermediate_size"], "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"], "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config["first_k_dense_replace"], "expert_gating_func": 2,
        "expert_weights_scale": config["routed_scaling_factor"], "expert_weights_norm": config["norm_topk_prob"],
    }  # fmt: skip


def _minimax_keys(config: Config) -> Keys:
    part = rope_of(config).get("partial_rotary_factor", 1.0)
    return {
        "expert_feed_forward_length": config["intermediate_size"], "expert_gating_func": 2,
        "rope.dimension_count": int(_head_size(config) * part),
    }  # fmt: skip


_LLAMA = Conversion("llama", _llama_keys, _permuted, _llama3_factors)
_BERT = Conversion("bert", _bert_keys, _bert)
_ROBERTA = Conversion("bert", _roberta_keys, _roberta)

CONVERSIONS = {
    "ApertusForCausalLM": Conversion("apertus", _llama_keys, _apertus, _llama3_factors, _apertus_arrays),
    "BertModel": _BERT,
    "Cohere2ForCausalLM": Conversion("cohere2", _cohere2_keys),
    "DeepseekV2ForCausalLM": Conversion("deepseek2", _deepseek_keys, _deepseek),
    "DeepseekV3ForCausalLM": Conversion("deepseek2", _deepseek_keys, _deepseek),
    "Ernie4_5ForCausalLM": Conversion("ernie4_5"),
    "Ernie4_5_MoeForCausalLM": Conversion("ernie4_5-moe", _ernie_moe_keys, _corrected),
    "Exaone4ForCausalLM": Conversion("exaone4", _window_keys, extra=_llama3_factors),
    "GPT2LMHeadModel": Conversion("gpt2", _gpt2_keys, _gpt2),
    "FalconH1ForCausalLM": Conversion("falcon-h1", _falcon_keys, _falcon),
    "Gemma2ForCausalLM": Conversion("gemma2", _gemma2_keys, _plus_one),
    "Gemma3ForCausalLM": Conversion("gemma3", _gemma3_keys, _plus_one),
    "Gemma3TextModel": Conversion("gemma-embedding", _gemma3_keys, _embedding_gemma),
    "Gemma3nForCausalLM": Conversion("gemma3n", _gemma3n_keys, _gemma3n),
    "Gemma4ForCausalLM": Conversion("gemma4", _gemma4_keys, _gemma4, _gemma4_factors),
    "Glm4ForCausalLM": Conversion("glm4", _glm4_keys),
    "Glm4MoeForCausalLM": Conversion("glm4moe", _glm4_moe_keys, _corrected),
    "Glm4MoeLiteForCausalLM": Conversion("deepseek2", _deepseek_keys, _deepseek),
    "GptOssForCausalLM": Conversion("gpt-oss", _gpt_oss_keys, _gpt_oss),
    "GraniteForCausalLM": Conversion("granite", _granite_keys, _permuted),
    "GraniteMoeHybridForCausalLM": Conversion("granitehybrid", _granite_hybrid_keys, _granite_hybrid),
    "Lfm2ForCausalLM": Conversion("lfm2", _lfm2_keys, _lfm2),
    "Lfm2MoeForCausalLM": Conversion("lfm2moe", _lfm2_moe_keys, _lfm2),
    "HunYuanDenseV1ForCausalLM": Conversion("hunyuan-dense", _hunyuan_keys),
    "LlamaForCausalLM": _LLAMA,
    "MiniMaxM2ForCausalLM": Conversion("minimax-m2", _minimax_keys, _corrected),
    "Ministral3ForCausalLM": Conversion("mistral3", _mistral3_keys, _permuted),
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": _LLAMA,
    "NemotronHForCausalLM": Conversion("nemotron_h_moe", _nemotron_keys, _nemotron),
    "NemotronHForCausalLM, dense": Conversion("nemotron_h", _nemotron_keys, _nemotron),
    "NomicBertModel": Conversion("nomic-bert", _nomic_keys, _bert),
    "Olmo2ForCausalLM": Conversion("olmo2"),
    "Olmo3ForCausalLM": Conversion("olmo2", _window_keys),
    "OlmoeForCausalLM": Conversion("olmoe"),
    "Phi3ForCausalLM": Conversion("phi3", _phi3_keys, extra=_phi3_factors),
    "Qwen2ForCausalLM": Conversion("qwen2"),
    "Qwen2MoeForCausalLM": Conversion("qwen2moe", _expert_keys),
    "Qwen3ForCausalLM": Conversion("qwen3"),
    "Qwen3MoeForCausalLM": Conversion("qwen3moe", _expert_keys),
    "Qwen3NextForCausalLM": Conversion("qwen3next", _qwen3_next_keys, _qwen3_next),
    "Qwen3_5ForCausalLM": Conversion("qwen35", _qwen35_keys, _qwen35),
    "Qwen3_5MoeForCausalLM": Conversion("qwen35moe", _qwen35_keys, _qwen35),
    "RobertaModel": _ROBERTA,
    "SeedOssForCausalLM": Conversion("seed_oss"),
    "SmolLM3ForCausalLM": Conversion("smollm3", _llama_keys, _permuted),
    "Starcoder2ForCausalLM": Conversion("starcoder2"),
    "XLMRobertaForSequenceClassification": _ROBERTA,
    "XLMRobertaModel": _ROBERTA,
}
"""Conversions by the class in config.json; a class may have another one for models without experts."""

_FLOATS = ("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d", "shortconv.conv.weight")


def is_quantized(stored: str, array: np.ndarray) -> bool:
    """Return True for a tensor that llama.cpp's converter quantizes, which does not take one row for a matrix."""
    is_matrix = any(size > 1 for size in array.shape[:-1]) and array.shape[-1] % 32 == 0
    return is_matrix and stored.endswith("weight") and not any(part in stored for part in _FLOATS)


def conversion_of(config: Config) -> Conversion:
    """Return the conversion of a model."""
    name = config["architectures"][0]
    dense = f"{name}, dense"
    return CONVERSIONS[dense if dense in CONVERSIONS and not config.get("n_routed_experts") else name]


def keys_of(config: Config) -> Keys:
    """Return all keys of a model's architecture, without its name."""
    conversion = conversion_of(config)
    keys = common_keys(config) | conversion.keys(config)
    return {name: value for name, value in keys.items() if value is not None}


def tensors_of(config: Config, tensors: dict[str, np.ndarray]) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield for each tensor of the file its name there, the folder's name, and its values."""
    conversion = conversion_of(config)
    kinds = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[conversion.architecture], keys_of(config)["block_count"])
    for name, values in stacked({_predicting_name(config, name): each for name, each in tensors.items()}).items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        for changed, array in conversion.change(config, name, values):
            stored = _nextn_name(config, changed) or names.get_name(changed, (".weight", ".bias", ".scale"))
            assert stored is not None, changed
            yield stored, name, array
    for stored, array in conversion.extra(config):
        yield stored, stored, array
