"""adapter_config.json of PEFT: the fields that change what is computed. All others are known to change nothing.

Source: `LoraConfig` of peft 0.21 and of the versions before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.kernels.adapters.json_config import read_config
from quire.kernels.adapters.patterns import ModulePatterns
from quire.kernels.errors import LONGEST_QUOTE, ModelError, quoted

CONFIG = "adapter_config.json"
_MOST_BYTES = 1 << 21  # the most tokens, each on a line of its own
_MOST_DEPTH = 32
_MOST_TOKENS = 100_000
_MOST_NAMES, _MOST_PARAMETERS = 64, 256

_IGNORED = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type", "velora_config",
}  # fmt: skip
"""Fields that change nothing once an adapter is trained: the file's tensors say which modules it adapts."""

_READ = {
    "alpha_pattern", "bias", "fan_in_fan_out", "init_lora_weights", "lora_alpha", "lora_bias", "modules_to_save",
    "peft_type", "r", "rank_pattern", "target_parameters", "trainable_token_indices", "use_dora", "use_rslora",
}  # fmt: skip

_REJECTED = {
    "alora_invocation_tokens": "adapters that begin at some tokens (aLoRA) are not supported; train one without it",
    "arrow_config": "routing between adapters (Arrow) is not supported; serve its adapters one by one",
    "ensure_weight_tying": "tied adapters are not supported; train with it false",
    "enable_lora": "this form of peft 0.2 is not supported; save the adapter with a later peft",
    "invocation_string": "adapters that begin at some text (aLoRA) are not supported; train one without it",
    "kasa_config": "it changes the weights of the base model (KaSA); merge it with merge_and_unload",
    "layer_replication": "models with replicated layers are not supported; merge the adapter with merge_and_unload",
    "monteclora_config": "random adapters (MonteCLoRA) are not supported; merge it with merge_and_unload",
    "use_bdlora": "block-diagonal adapters (BD-LoRA) are not supported; train one without it",
    "use_qalora": "adapters of grouped inputs (QALoRA) are not supported; train one without it",
}
"""Fields that must be off, and what to do."""

_INITIALIZATIONS = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that leave the base model as it is."""

_BIASES = ("none", "all", "lora_only")


@dataclass(frozen=True)
class PeftConfig:
    """Contents of an adapter_config.json. Paths of modules are those in the model that was trained."""

    path: Path
    rank: int
    alpha: float
    ranks: ModulePatterns
    alphas: ModulePatterns
    use_rslora: bool
    use_dora: bool
    lora_bias: bool
    fan_in_fan_out: bool
    tokens: Any
    max_rank: int
    parameters: tuple[str, ...]  # target_parameters
    saved: tuple[str, ...]  # modules_to_save

    def rank_of(self, module: str) -> int:
        """Return the rank of a module."""
        return _rank(self.path, "rank_pattern", self.ranks.get(module, self.rank), self.max_rank)

    def scale_of(self, module: str, rank: int) -> float:
        """Return what multiplies B A in a module. Raises ModelError."""
        alpha = _number(self.path, "alpha_pattern", self.alphas.get(module, self.alpha))
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def tokens_of(self, module: str) -> tuple[int, ...]:
        """Return the tokens whose rows an embedding has of its own, in the order of the rows. Raises ModelError."""
        found = self.tokens
        if isinstance(found, dict):
            ends = (value for name, value in found.items() if f".{module}".endswith(f".{name}"))
            found = next(ends, None)
        if (
            not isinstance(found, list)
            or not 1 <= len(found) <= _MOST_TOKENS
            or not all(type(token) is int and 0 <= token < 1 << 31 for token in found)
            or len(set(found)) != len(found)
        ):
            raise _bad(
                self.path, "trainable_token_indices", self.tokens,
                f"for {module} it must list 1 to {_MOST_TOKENS} different tokens, whose rows the file has",
            )  # fmt: skip
        return tuple(found)


def read_peft_config(folder: Path, max_rank: int) -> PeftConfig:
    """Read adapter_config.json of a folder. Raises ModelError for what is not supported."""
    path = folder / CONFIG
    fields = read_config(path, _MOST_BYTES)
    if _depth(fields) > _MOST_DEPTH:
        raise ModelError(f"{path} nests values more than {_MOST_DEPTH} times; it is not the config of an adapter")
    if fields.get("peft_type") != "LORA":
        raise _bad(path, "peft_type", fields.get("peft_type"), "supported is LORA; merge others with merge_and_unload")
    for name, value in fields.items():
        _check_unread(path, name, value)
    _check_initialization(path, fields.get("init_lora_weights"))
    _choice(path, fields, "bias", _BIASES)
    if _flag(path, fields, "use_dora") and _flag(path, fields, "lora_bias"):
        raise _bad(path, "lora_bias", True, "with use_dora it must be false")
    tokens = fields.get("trainable_token_indices")
    return PeftConfig(
        path, _rank(path, "r", fields.get("r"), max_rank), _number(path, "lora_alpha", fields.get("lora_alpha")),
        ModulePatterns(f"{path}: rank_pattern", _object(path, fields, "rank_pattern")),
        ModulePatterns(f"{path}: alpha_pattern", _object(path, fields, "alpha_pattern")),
        _flag(path, fields, "use_rslora"), _flag(path, fields, "use_dora"), _flag(path, fields, "lora_bias"),
        _flag(path, fields, "fan_in_fan_out"), tokens, max_rank,
        _names(path, fields, "target_parameters", _MOST_PARAMETERS),
        _names(path, fields, "modules_to_save", _MOST_NAMES),
    )  # fmt: skip


def _depth(value: Any) -> int:
    """Return how many levels of objects and lists a value has, up to one more than the most allowed."""
    level, depth = [value], 0
    while level and depth <= _MOST_DEPTH:
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        depth += 1
    return depth


def _check_unread(path: Path, name: str, value: Any) -> None:
    """Raise ModelError for a field that may change what is computed, and is not read, unless it is off."""
    if name in _IGNORED or name in _READ or value in (None, False, "", [], {}):
        return
    raise _bad(path, name, value, _REJECTED.get(name, "this field is not known; remove it if it changes nothing"))


def _check_initialization(path: Path, value: Any) -> None:
    text = value.lower() if isinstance(value, str) else value
    if text is not None and not any(type(text) is type(known) and text == known for known in _INITIALIZATIONS):
        raise _bad(
            path, "init_lora_weights", value,
            "such an initialization changes the weights of the base model; have save_pretrained convert the adapter "
            "with path_initial_model_for_weight_conversion, or merge it with merge_and_unload",
        )  # fmt: skip


def _rank(path: Path, field: str, value: Any, most: int) -> int:
    if type(value) is not int or value < 1:
        raise _bad(path, field, value, f"ranks must be from 1 to {most}, which is max_lora_rank")
    if value > most:
        raise _bad(path, field, value, f"max_lora_rank is {most}; start the engine with a higher one")
    return value


def _number(path: Path, field: str, value: Any) -> float:
    limit = float(np.finfo(np.float32).max)
    if type(value) not in (int, float) or not -limit <= value <= limit:
        raise _bad(path, field, value, "it must be a finite number of f32")
    return float(value)


def _flag(path: Path, fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and type(value) is not bool:
        raise _bad(path, name, value, "it must be true or false")
    return bool(value)


def _object(path: Path, fields: dict[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name)
    if value is not None and not isinstance(value, dict):
        raise _bad(path, name, value, "it must be an object of values by patterns of modules")
    return value or {}


def _names(path: Path, fields: dict[str, Any], name: str, most: int) -> tuple[str, ...]:
    value = fields.get(name)
    given = [value] if isinstance(value, str) else value or []
    if not isinstance(given, list) or len(given) > most or not all(isinstance(each, str) for each in given):
        raise _bad(path, name, value, f"it must list at most {most} names")
    return tuple(given)


def _choice(path: Path, fields: dict[str, Any], name: str, allowed: tuple[str, ...]) -> None:
    value = fields.get(name)
    if value is not None and value not in allowed:
        raise _bad(path, name, value, f"it must be one of {', '.join(allowed)}")


def _bad(path: Path, field: str, value: Any, advice: str) -> ModelError:
    """Return the error of a field, in one line."""
    name = field if field.isprintable() and len(field) <= LONGEST_QUOTE else quoted(field)
    given = "is missing" if value is None else f"is {quoted(value)}"
    return ModelError(f"{path}: {name} {given}; {advice}")
