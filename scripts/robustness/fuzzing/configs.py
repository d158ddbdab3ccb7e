"""Target `configs`: the JSON files of a model folder: the model's config, the tokenizer and its configs.

An input is these files in the order of `FILES`, separated by zero bytes. Next to them are the weights of a small Llama.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import small_tokenizers
import tiny_model
from fuzzing.target import mutate_json, replace

from quire.engine_core.grammar.tokenizer import GrammarTokenizer
from quire.frontend.errors import ChatTemplateError
from quire.frontend.text.chat.template_files import find_template
from quire.frontend.text.generation_config import generation_defaults
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.text.tokenizer_files import SPECIAL_TOKEN_NAMES, TokenizerError
from quire.kernels.errors import ModelError
from quire.kernels.models import ARCHITECTURES
from quire.kernels.operands import ArrayWeight, RopeTable
from quire.kernels.options import LoadOptions
from quire.kernels.runner import describe, pooler_of

FILES = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json",
    "vocab.json", "added_tokens.json", "chat_template.json",
    "modules.json", "pooling/config.json", "config_sentence_transformers.json", "sentence_bert_config.json",
)  # fmt: skip
_TEXT = "Once upon a time, ab <added></s>"
_MERGES = "#version: 0.2\na b\n"
_MOST_POSITIONS = 4096  # of which tables are made
_VOCAB = {"a": 0, "b": 1, "ab": 2, "<eos>": 3}
_ADDED = {"4": {"content": "<added>", "lstrip": True, "special": False, "normalized": True}}
_SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
     "attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": False},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "factor": 4.0,
     "original_max_position_embeddings": 64},
]  # fmt: skip
_QUANTIZATIONS: list[dict[str, Any]] = [
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True, "dynamic": {"-:.*q_proj": {}}},
    {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm",
     "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*down.*"],
     "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": {
         "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None}}}},
]  # fmt: skip
_GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_head": 1, "n_layer": 2, "n_positions": 256, "n_inner": None,
    "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
}  # fmt: skip
_GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"], "layer_types": ["sliding_attention", "full_attention"], "head_dim": 32,
    "num_hidden_layers": 2, "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "per_layer_config": {"1": {"head_dim": 64}}, "num_kv_shared_layers": 0, "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 512, "enable_moe_block": True, "num_experts": 2,
    "top_k_experts": 1, "moe_intermediate_size": 32, "sliding_window": 64, "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": "vision",
    "rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5}},
}  # fmt: skip
_GEMMA3N: dict[str, Any] = {
    "architectures": ["Gemma3nForCausalLM"], "layer_types": ["sliding_attention", "full_attention"], "head_dim": 32,
    "num_hidden_layers": 2, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 32, "sliding_window": 64,
    "vocab_size_per_layer_input": 300, "altup_num_inputs": 3, "altup_active_idx": 0, "altup_correct_scale": True,
    "laurel_rank": 16, "intermediate_size": [64, 96], "activation_sparsity_pattern": [0.9, 0.0],
    "final_logit_softcapping": 30.0, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
}  # fmt: skip
_MODULES: list[tuple[str, dict[str, Any]]] = [
    ("a.Pooling", {"pooling_mode_mean_tokens": True, "include_prompt": False}),
    ("a.Pooling", {"pooling_mode": "lasttoken"}),
    ("a.Dense", {"in_features": 64, "out_features": 8, "activation_function": "a.Tanh"}),
    ("a.LogitScore", {"true_token_id": 3, "false_token_id": 2}),
]
_FROM_TOKENS = {
    "id2label": {"0": "a"},
    "problem_type": "regression",
    "sentence_transformers": {"activation_fn": "a.Sigmoid"},
}
_MODELS: list[dict[str, Any]] = [
    {"classifier_from_token": ["a", "b"], "method": "from_2_way_softmax"},
    {"classifier_from_token": ["a", "b"], "is_original_qwen3_reranker": True},
    _GPT2,
    _GEMMA4,
    _GEMMA3N,
    {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": tiny_model.CONFIG | _GEMMA4},
    *({"rope_scaling": scaling} for scaling in _SCALINGS),
    *({"quantization_config": quantization} for quantization in _QUANTIZATIONS),
]


def _small_tokenizer(kind: str) -> dict[str, Any]:
    """Return a tokenizer of each kind with few entries, so that mutation meets the others too."""
    state: dict[str, Any] = json.loads(small_tokenizers.KINDS[kind]().to_str())
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = dict(list(model["vocab"].items())[:24])
    model["merges"] = []
    if kind == "word_piece":
        del model["merges"]
    return state


class Configs:
    """Every folder gives a plan or ModelError, a tokenizer or TokenizerError, a chat template or ChatTemplateError."""

    def __init__(self, folder: Path) -> None:
        self._folder = tiny_model.write(folder, tiny_model.weights())
        (folder / "merges.txt").write_text(_MERGES)
        (folder / "pooling").mkdir(exist_ok=True)
        self._options = LoadOptions(str(folder), max_num_seqs=4, max_num_batched_tokens=64)

    @property
    def words(self) -> tuple[str, ...]:
        """See Target."""
        names = ("rope_scaling", "rope_theta", "quantization_config", "sliding_window", "use_sliding_window")
        more = ("added_tokens_decoder", "tokenizer_class", "LlamaTokenizer", "Qwen2Tokenizer", "add_bos_token")
        layers = ("layer_types", "max_window_layers", "sliding_attention", "full_attention", "no_rope_layers")
        return (*tiny_model.CONFIG, *ARCHITECTURES, *SPECIAL_TOKEN_NAMES, *names, *more, *layers)

    def seeds(self) -> Iterator[bytes]:
        """See Target."""
        eos = {"eos_token_id": [0, 2], "bos_token_id": 1}
        special = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
        tokenizer = {**special, "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "chat_template": "{{ 1 }}"}
        for architecture in ARCHITECTURES:
            config = {**tiny_model.CONFIG, "architectures": [architecture], "sliding_window": 64, "layer_types": None}
            yield _joined({"config.json": config, "generation_config.json": eos, "tokenizer_config.json": tokenizer})
        for kind, own in _MODULES:
            modules = [{"type": "a.Transformer", "path": ""}, {"type": kind, "path": "pooling"}]
            texts = {"prompts": {"query": "a"}, "default_prompt_name": "query", "similarity_fn_name": "dot"}
            written: dict[str, Any] = {
                "config.json": tiny_model.CONFIG | _FROM_TOKENS,
                "pooling/config.json": own,
                "modules.json": modules,
                "sentence_bert_config.json": {"max_seq_length": 8},
                "config_sentence_transformers.json": texts,
                "tokenizer.json": _small_tokenizer("byte_level"),
            }
            yield _joined(written)
        for more in _MODELS:
            yield _joined({"config.json": tiny_model.CONFIG | more})
        templates = [{"name": "a", "template": "b"}]
        for kind in small_tokenizers.KINDS:
            files = {
                "tokenizer_config.json": tokenizer | {"chat_template": templates},
                "special_tokens_map.json": special,
            }
            yield _joined({**files, "tokenizer.json": _small_tokenizer(kind)})
        for name in ("GPT2Tokenizer", "Qwen2Tokenizer"):
            config = {"tokenizer_class": name, "added_tokens_decoder": _ADDED, "eos_token": "<eos>"}
            files = {"tokenizer_config.json": config, "added_tokens.json": {"<more>": 5}}
            yield _joined({**files, "vocab.json": _VOCAB, "chat_template.json": {"chat_template": "{{ 1 }}"}})

    def test(self, data: bytes) -> None:
        """See Target."""
        parts = data.split(b"\0")
        for name, content in zip(FILES, [*parts, *[b""] * len(FILES)], strict=False):
            replace(self._folder / name, content or None)
        self._plan()
        self._tokenize()

    def _plan(self) -> None:
        try:
            plan, checkpoint = describe(self._options)
            eos_token_ids = checkpoint.eos_token_ids()
        except ModelError:
            return
        assert all(0 <= token_id < 1 << 31 for token_id in eos_token_ids)
        assert plan.page_bytes > 0
        assert 0 < plan.attention_context < math.inf
        with suppress(ModelError):
            pooler = pooler_of(self._options, checkpoint)
            assert all(np.isfinite(layer.weight).all() for layer in pooler.head)
            assert pooler.embedding_size > 0 or pooler.labels
        for weight in plan.weights:
            if isinstance(weight, ArrayWeight) and not (
                isinstance(weight, RopeTable) and weight.positions > _MOST_POSITIONS
            ):
                with suppress(ModelError):
                    assert np.isfinite(weight.values(checkpoint)).all()

    def _tokenize(self) -> None:
        with suppress(TokenizerError):
            tokenizer = Tokenizer(self._folder)
            ids = tokenizer.encode(_TEXT)
            assert tokenizer.fewest_tokens(_TEXT) <= len(ids)
            assert isinstance(tokenizer.decode(ids), str)
            for token_id in (0, 3, 1 << 20):
                tokenizer.token_text(token_id)
        for name in ("default", "a"):
            with suppress(ChatTemplateError, TokenizerError):
                assert isinstance(find_template(self._folder, name).source, str)
        with suppress(TokenizerError):
            generation_defaults(self._folder)
        with suppress(ValueError, RuntimeError):
            GrammarTokenizer(str(self._folder)).get()

    def mutate(self, data: bytes, random: Random) -> bytes:
        """See Target."""
        parts = data.split(b"\0")
        at = random.choice([index for index, part in enumerate(parts) if part] or [0])
        parts[at] = mutate_json(parts[at], random)
        return b"\0".join(parts)


def _joined(files: dict[str, Any]) -> bytes:
    return b"\0".join(json.dumps(files[name]).encode() if name in files else b"" for name in FILES)
