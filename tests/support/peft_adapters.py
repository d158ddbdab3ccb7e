"""Adapters that PEFT itself makes, random ones of tiny random models, and what they compute in torch."""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from quire.kernels.config import ModelConfig
from quire.kernels.graph.operations import Graph
from quire.kernels.models import ARCHITECTURES

HIDDEN, VOCABULARY = 32, 48
_SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
}  # fmt: skip
_CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, _SIZES),
    "llama-biases": (transformers.LlamaConfig, {**_SIZES, "attention_bias": True, "mlp_bias": True}),
    "qwen3-tied": (transformers.Qwen3Config, {**_SIZES, "tie_word_embeddings": True}),
    "gpt2": (
        transformers.GPT2Config,
        {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64},
    ),
}


@functools.cache
def config_of(name: str) -> Any:
    kind, fields = _CONFIGS[name]
    return kind(**fields)


@functools.cache
def graph_of(name: str) -> Graph:
    """Return the graph of a model."""
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config_of(name))].__name__
    return ARCHITECTURES[model_class](ModelConfig(json.loads(config_of(name).to_json_string())))


def adapted(name: str, **fields: Any) -> Any:
    """Return a model with an adapter, all random: what PEFT begins with zeros, too."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name)).eval()
    for parameter in model.parameters():  # biases too
        parameter.data = torch.randn(parameter.shape) * 0.3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fan_in_fan_out, and of tied layers
        made = peft.get_peft_model(model, peft.LoraConfig(**fields)).eval()
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape) * 0.3
    return made


def randomized(model: Any, **fields: Any) -> Any:
    """Return a model with an adapter whose parts are random, near those that PEFT begins with."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied layers
        made = peft.get_peft_model(model, peft.LoraConfig(**fields)).eval()
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + torch.randn(parameter.shape) * 0.1
    return made


def save(model: Any, folder: Path) -> Path:
    """Save an adapter alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return folder


def linear_modules(model: Any) -> dict[str, Any]:
    """Return the adapted linear layers of a model by their paths in it."""
    modules = model.base_model.model.named_modules()
    return {name: module for name, module in modules if isinstance(module, peft.tuners.lora.Linear)}


def output(module: Any, x: Any) -> Any:
    """Return what a module makes of a numpy array."""
    with torch.no_grad():
        return module(torch.from_numpy(x)).numpy()
