"""The config.json and generation_config.json of a GGUF file, and the names that its tensors have in a folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.kernels.errors import ModelError
from quire.kernels.gguf.container import GgufModel

METHOD = "gguf"
"""`quant_method` in config.json."""

FLOAT_TYPES = ("F32", "F16", "BF16")

_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_LINEAR_SCALING = ("linear", "yarn")


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files: the class that config.json names, and whether q and k have their rows permuted."""

    name: str
    is_permuted: bool = False


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", is_permuted=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
}
"""Architectures by `general.architecture`."""

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def tensor_name(name: str) -> str:
    """Return the name that a tensor of a GGUF file has in a model folder; other names stay as they are."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    block, _, rest = name.partition(".")
    number, _, last = rest.partition(".")
    part, _, kind = last.rpartition(".")
    if block != "blk" or part not in _LAYER_NAMES:
        return name
    return f"model.layers.{number}.{_LAYER_NAMES[part]}.{kind}"


def permuted_heads(metadata: Mapping[str, Any], name: str) -> int:
    """Return the number of heads whose rows are permuted in a tensor (by its name in a model folder), 0 for none.

    llama.cpp's conversion has rows 2 j and 2 j + 1 of each head where a model folder has j and j + dim/2.
    """
    reader = _Metadata(metadata)
    if not reader.architecture().is_permuted:
        return 0
    module = name.rsplit(".", 1)[0]
    if module.endswith("self_attn.q_proj"):
        return reader.heads()
    return reader.kv_heads() if module.endswith("self_attn.k_proj") else 0


def config_of(model: GgufModel) -> dict[str, Any]:
    """Return the fields of config.json. Raises ModelError for an architecture or a field that is not supported."""
    reader = _Metadata(model.metadata)
    architecture, embedding = reader.architecture(), model.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError("the GGUF file lacks tensor token_embd.weight; it holds no language model, or part of one")
    heads, hidden = reader.heads(), reader.size("embedding_length")
    head_dim = reader.size("attention.key_length", hidden // heads)
    if reader.size("attention.value_length", head_dim) != head_dim:
        raise reader.unsupported("attention.value_length", f"it must be {head_dim}, as attention.key_length")
    if reader.size("rope.dimension_count", head_dim) != head_dim:
        raise reader.unsupported("rope.dimension_count", f"it must be {head_dim}, the size of a head")
    if reader.own("expert_count"):
        raise reader.unsupported("expert_count", "mixtures of experts are not supported")
    types = {
        tensor_name(tensor.name).removesuffix(".weight"): tensor.type
        for tensor in model.tensors.values()
        if tensor.type not in FLOAT_TYPES
    }
    return {
        "architectures": [architecture.name],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": reader.size("feed_forward_length"),
        "num_hidden_layers": reader.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.kv_heads(),
        "head_dim": head_dim,
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": reader.size("context_length"),
        "rope_theta": reader.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(model, reader),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in model.tensors,
        "quantization_config": {"quant_method": METHOD, "types": types} if types else None,
    }


def generation_config_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of generation_config.json: every token that ends an answer."""
    ids = [metadata.get(f"tokenizer.ggml.{name}") for name in _ENDS]
    return {"eos_token_id": sorted({id_ for id_ in ids if type(id_) is int})}


def _rope_scaling(model: GgufModel, reader: _Metadata) -> dict[str, Any] | None:
    length = reader.size("context_length")
    factors = model.tensors.get("rope_freqs.weight")
    if factors is not None:  # llama3's scaling, whose factors are in the file instead of its parameters
        if factors.type != "F32" or len(factors.shape) != 1:
            raise ModelError(
                f"the GGUF file has rope_freqs.weight in type {factors.type} and shape {list(factors.shape)}; it must "
                "be a list of F32"
            )
        values = factors.data.view("<f4").tolist()
        return {
            "rope_type": "longrope", "short_factor": values, "long_factor": values, "attention_factor": 1.0,
            "original_max_position_embeddings": length,
        }  # fmt: skip
    kind = reader.own("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind not in _LINEAR_SCALING:
        raise reader.unsupported("rope.scaling.type", f"supported are none, {', '.join(_LINEAR_SCALING)}")
    scaling = {"rope_type": kind, "factor": reader.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = reader.size("rope.scaling.original_context_length", length)
    return scaling


class _Metadata:
    """Typed access to the keys of the file's architecture, with errors that name the key."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._prefix = metadata.get("general.architecture")

    def architecture(self) -> Architecture:
        found = ARCHITECTURES.get(self._prefix) if isinstance(self._prefix, str) else None
        if found is None:
            given = repr(self._prefix)[:80]
            raise ModelError(
                f"the GGUF file has general.architecture {given}; supported in GGUF files are "
                f"{', '.join(ARCHITECTURES)}; take the model's safetensors for others"
            )
        return found

    def heads(self) -> int:
        return self.size("attention.head_count")

    def kv_heads(self) -> int:
        return self.size("attention.head_count_kv", self.heads())

    def own(self, name: str) -> Any:
        """Return the value of a key of the architecture, None if it is missing."""
        return self._metadata.get(f"{self._prefix}.{name}")

    def size(self, name: str, default: int | None = None) -> int:
        value = default if self.own(name) is None else self.own(name)
        if type(value) is not int or not 1 <= value <= 1 << 31:
            raise self.unsupported(name, "it must be an integer above 0, the same for all layers")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = default if self.own(name) is None else self.own(name)
        if type(value) is not float or not math.isfinite(value) or value <= 0:
            raise self.unsupported(name, "it must be a number above 0")
        return value

    def unsupported(self, name: str, advice: str) -> ModelError:
        value = self.own(name)
        given = "lacks" if value is None else f"has {repr(value)[:80]} as"
        return ModelError(f"the GGUF file {given} {self._prefix}.{name}; {advice}")
