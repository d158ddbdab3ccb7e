"""The start of speculative decoding, by the options of the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.engine_core.speculation.draft_model import DraftModel
from quire.engine_core.speculation.eagle import EagleDrafts
from quire.engine_core.speculation.proposer import Proposer
from quire.engine_core.speculation.speculation import Speculation
from quire.engine_core.speculation.synthetic import SyntheticDrafts
from quire.engine_core.speculation.text import PredictedDrafts, TextDrafts
from quire.kernels.draft_head import features_for, load_draft_head
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Features
from quire.kernels.options import LoadOptions
from quire.kernels.runner import ModelRunner, load_model
from quire.protocol.engine_options import EngineProcessOptions
from quire.protocol.engine_shape import EngineShape
from quire.protocol.speculative_config import HEAD_METHODS, SpeculativeConfig, parse_speculative_config

_KV_SHARE = 4  # one part in so many of the target's KV memory is what the draft model's may take
_TOKENIZER = "tokenizer.json"
_PREDICTED_DRAFTS = 16  # most of a sequence in a step


def start_speculation(
    options: EngineProcessOptions, loading: LoadOptions, runner: ModelRunner, limits: EngineShape
) -> Speculation | None:
    """Return what drafts tokens for the sequences of `runner`; None for an encoder. Raises ModelError.

    A draft model is loaded with the options that the model was loaded with, `loading`. Without `speculative_config`
    there are drafts only for requests that bring a prediction.
    """
    if runner.computes_whole_prompts and options.speculative_config is not None:
        raise ModelError("speculative_config drafts tokens, and an encoder samples none; leave it out")
    if runner.computes_whole_prompts:
        return None
    if options.speculative_config is None:
        return Speculation(TextDrafts(runner.sequences), runner.sequences, _PREDICTED_DRAFTS, limits)
    config = parse_speculative_config(options.speculative_config)
    proposer = _proposer(config, loading, runner, limits)
    if config.synthetic_acceptance is not None:
        runner.set_synthetic_acceptance(config.synthetic_acceptance)
    return Speculation(
        proposer, runner.sequences, config.max_drafts, limits, is_adaptive=config.adaptive,
        set_observed=runner.set_keeps_features,
    )  # fmt: skip


def features_needed(options: EngineProcessOptions, loading: LoadOptions) -> Features | None:
    """Return the hidden states that the model is to keep for a draft head. Raises ModelError."""
    if options.speculative_config is None:
        return None
    config = parse_speculative_config(options.speculative_config)
    return features_for(config.model, config.method, loading) if config.method in HEAD_METHODS else None


def _proposer(config: SpeculativeConfig, loading: LoadOptions, runner: ModelRunner, limits: EngineShape) -> Proposer:
    if config.method in HEAD_METHODS:
        own = _own_options(config, loading, runner)
        head = load_draft_head(config.model, config.method, own, loading, runner)
        if head.max_model_len <= config.max_drafts:
            raise ModelError(
                f"speculative_config: the draft head {own.model} has max_position_embeddings {head.max_model_len}, "
                f"and num_speculative_tokens is {config.max_drafts}; it must be less"
            )
        return PredictedDrafts(TextDrafts(runner.sequences), EagleDrafts(head, runner.sequences, runner.features()))
    if config.model is not None:
        draft = _load(config, config.model, loading, runner, limits)
        model = DraftModel(
            draft, runner.sequences, max_model_len=draft.max_model_len,
            max_num_batched_tokens=draft.max_num_batched_tokens,
        )  # fmt: skip
        return PredictedDrafts(TextDrafts(runner.sequences), model)
    if config.synthetic_acceptance is not None:
        return SyntheticDrafts(runner.sequences, config.synthetic_acceptance)
    return TextDrafts(runner.sequences, config)


def _load(
    config: SpeculativeConfig, model: str, loading: LoadOptions, runner: ModelRunner, limits: EngineShape
) -> ModelRunner:
    """Load the draft model. Raises ModelError for one with another vocabulary."""
    _check_vocabulary(loading.model, model)
    draft = load_model(_own_options(config, loading, runner))
    if draft.vocab_size != limits.vocab_size:
        raise ModelError(
            f"speculative_config: the model {model} has a vocabulary of {draft.vocab_size} tokens, and {loading.model} "
            f"one of {limits.vocab_size}; a draft model must have the same"
        )
    if draft.computes_whole_prompts:
        raise ModelError(f"speculative_config: the model {model} is an encoder, which samples no tokens")
    return draft


def _own_options(config: SpeculativeConfig, loading: LoadOptions, runner: ModelRunner) -> LoadOptions:
    """Return the options by which what drafts is loaded beside the model; what is in its files is loaded as it is."""
    own = replace(
        loading, quantization=config.quantization or loading.quantization, max_model_len=None, num_pages=None,
        kv_memory_fd=None, weights_fd=None, memory_limit=None, max_loras=0, kv_host_memory=0,
        kv_cache_memory_bytes=max(runner.kv_bytes // _KV_SHARE, 1 << 24),
    )  # fmt: skip
    if config.model is None:
        return own
    return replace(own, model=config.model, quantization=config.quantization, hf_overrides=None)


def _check_vocabulary(target: str, draft: str) -> None:
    """Raise ModelError if both folders have a tokenizer, and their tokens differ."""
    own, other = _vocabulary(target), _vocabulary(draft)
    if own is not None and other is not None and own != other:
        raise ModelError(
            f"speculative_config: the tokenizers of {draft} and {target} have different tokens; a draft model must "
            "have the same vocabulary"
        )


def _vocabulary(folder: str) -> Any:
    """Return the vocabulary in a folder's tokenizer.json; None if there is none that can be read."""
    try:
        return json.loads((Path(folder) / _TOKENIZER).read_bytes())["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
