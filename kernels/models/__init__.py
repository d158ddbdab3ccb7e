"""Architectures, one file each, which build the graph of a checkpoint's config."""

from __future__ import annotations

from collections.abc import Callable

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Graph, Logits
from quire.kernels.models import (
    apertus,
    bert,
    cohere2,
    deepseek,
    ernie4_5,
    exaone4,
    falcon_h1,
    gemma2,
    gemma3,
    gemma3n,
    gemma4,
    glm4,
    glm4_moe,
    gpt2,
    gpt_oss,
    granite,
    granite_hybrid,
    gte,
    hunyuan,
    lfm2,
    llama,
    minimax_m2,
    ministral3,
    mistral,
    mixtral,
    modernbert,
    nemotron_h,
    nomic_bert,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
    starcoder2,
)
from quire.kernels.models.multimodal import of_text_part
from quire.kernels.pooling.heads import Classifier, HeadLinear, num_labels

Builder = Callable[[ModelConfig], Graph]

_GENERATORS: dict[str, Builder] = {
    "ApertusForCausalLM": apertus.build,
    "Cohere2ForCausalLM": cohere2.build,
    "DeepseekV2ForCausalLM": deepseek.build_v2,
    "DeepseekV3ForCausalLM": deepseek.build_v3,
    "FalconH1ForCausalLM": falcon_h1.build,
    "Ernie4_5ForCausalLM": ernie4_5.build,
    "Ernie4_5_MoeForCausalLM": ernie4_5.build_moe,
    "Exaone4ForCausalLM": exaone4.build,
    "Gemma2ForCausalLM": gemma2.build,
    "Gemma3ForCausalLM": gemma3.build,
    "Gemma3ForConditionalGeneration": gemma3.build,
    "Gemma3nForCausalLM": gemma3n.build,
    "Gemma3nForConditionalGeneration": gemma3n.build,
    "Gemma4ForCausalLM": gemma4.build,
    "Gemma4ForConditionalGeneration": gemma4.build,
    "Glm4ForCausalLM": glm4.build,
    "Glm4MoeForCausalLM": glm4_moe.build,
    "Glm4MoeLiteForCausalLM": deepseek.build_glm4_moe_lite,
    "GPT2LMHeadModel": gpt2.build,
    "GptOssForCausalLM": gpt_oss.build,
    "GraniteForCausalLM": granite.build,
    "GraniteMoeHybridForCausalLM": granite_hybrid.build,
    "Lfm2ForCausalLM": lfm2.build,
    "Lfm2MoeForCausalLM": lfm2.build_moe,
    "HunYuanDenseV1ForCausalLM": hunyuan.build,
    "LlamaForCausalLM": llama.build,
    "MiniMaxM2ForCausalLM": minimax_m2.build,
    "Ministral3ForCausalLM": ministral3.build,
    "Mistral3ForConditionalGeneration": ministral3.build_text_part,
    "MistralForCausalLM": mistral.build,
    "MixtralForCausalLM": mixtral.build,
    "NemotronHForCausalLM": nemotron_h.build,
    "Olmo2ForCausalLM": olmo2.build,
    "Olmo3ForCausalLM": olmo3.build,
    "OlmoeForCausalLM": olmoe.build,
    "Phi3ForCausalLM": phi3.build,
    "Qwen2ForCausalLM": qwen2.build,
    "Qwen2MoeForCausalLM": qwen2_moe.build,
    "Qwen3ForCausalLM": qwen3.build,
    "Qwen3MoeForCausalLM": qwen3_moe.build,
    "Qwen3NextForCausalLM": qwen3_next.build_next,
    "Qwen3_5ForCausalLM": qwen3_next.build,
    "Qwen3_5ForConditionalGeneration": qwen3_next.build,
    "Qwen3_5MoeForCausalLM": qwen3_next.build_moe,
    "Qwen3_5MoeForConditionalGeneration": qwen3_next.build_moe,
    "SeedOssForCausalLM": seed_oss.build,
    "SmolLM3ForCausalLM": smollm3.build,
    "Starcoder2ForCausalLM": starcoder2.build,
}

GENERATORS = {name: of_text_part(build) for name, build in _GENERATORS.items()}
"""Builders of models that generate, by the class name in config.json's `architectures`."""

ENCODERS: dict[str, Builder] = {
    "BertModel": bert.build,
    "GteModel": gte.build,
    "ModernBertModel": modernbert.build,
    "NewModel": gte.build,
    "NomicBertModel": nomic_bert.build,
    "RobertaModel": bert.build_roberta,
    "XLMRobertaModel": bert.build_roberta,
}
"""Builders of encoders, which embed."""

ENCODER_HEADS: dict[str, Callable[[ModelConfig], Classifier]] = {
    "BertForSequenceClassification": bert.classifier,
    "GteForSequenceClassification": gte.classifier,
    "ModernBertForSequenceClassification": modernbert.classifier,
    "NewForSequenceClassification": gte.classifier,
    "RobertaForSequenceClassification": bert.roberta_classifier,
    "XLMRobertaForSequenceClassification": bert.roberta_classifier,
}
"""Heads of encoders that classify."""

_CAUSAL, _CLASSIFICATION = "ForCausalLM", "ForSequenceClassification"
_DECODERS = {name.removesuffix(_CAUSAL): build for name, build in GENERATORS.items() if name.endswith(_CAUSAL)}
_DECODERS["GPT2"] = gpt2.build


def _without_logits(build: Builder) -> Builder:
    return lambda config: build(config).without_logits


ARCHITECTURES: dict[str, Builder] = {
    **GENERATORS,
    **ENCODERS,
    **{name: ENCODERS[name.replace(_CLASSIFICATION, "Model")] for name in ENCODER_HEADS},
    **{name.replace("Model", "ForMaskedLM"): build for name, build in ENCODERS.items()},
    **{f"{name}Model": _without_logits(build) for name, build in _DECODERS.items()},
    **{f"{name}TextModel": _without_logits(_DECODERS[name]) for name in ("Gemma3", "Gemma3n", "Gemma4")},
    **{f"{name}{_CLASSIFICATION}": _without_logits(build) for name, build in _DECODERS.items()},
}
"""Builders of all models by their class name. A decoder without its logits embeds, or classifies by a layer `score`.

An encoder whose class predicts masked tokens embeds: sentence-transformers does not read the layers for that.
"""

_REASONS = {
    "JinaBert": "its attention adds ALiBi to the scores, which the kernels of attention cannot",
}
"""Why a family of models is not supported, where more is missing than a file here."""


def classifier_of(config: ModelConfig) -> Classifier | None:
    """Return the head of a model that classifies, None for any other. Raises ModelError."""
    name = config.architecture
    if name in ENCODER_HEADS:
        return ENCODER_HEADS[name](config)
    if not name.endswith(_CLASSIFICATION):
        return None
    return Classifier("last", (HeadLinear("score", num_labels(config), bias=False),))


def logits_of(config: ModelConfig) -> Logits | None:
    """Return the logits that a decoder has, though its class may give none; None for an encoder. Raises ModelError."""
    name = config.architecture
    build = GENERATORS.get(name, _DECODERS.get(name.removesuffix("Model").removesuffix(_CLASSIFICATION)))
    logits = None if build is None else build(config).logits
    return logits if isinstance(logits, Logits) else None


def build_graph(config: ModelConfig) -> Graph:
    """Return the graph of a model. Raises ModelError for an architecture or a field that is not supported."""
    build = ARCHITECTURES.get(config.architecture)
    if build is None:
        reason = next((f": {why}" for family, why in _REASONS.items() if config.architecture.startswith(family)), "")
        raise ModelError(
            f"architecture {config.architecture!r} is not supported{reason}; supported are "
            f"{', '.join((*GENERATORS, *ENCODERS))}, and these as ...Model, ...ForMaskedLM and "
            "...ForSequenceClassification"
        )
    return build(config)
