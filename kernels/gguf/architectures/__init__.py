"""Architectures of GGUF files, described family by family."""

from __future__ import annotations

from quire.kernels.errors import ModelError
from quire.kernels.gguf.architectures.decoders import COHERE2, GLM4, GPT2, GPT_OSS, OLMO2, PHI3, STARCODER2
from quire.kernels.gguf.architectures.deepseek import DEEPSEEK2
from quire.kernels.gguf.architectures.description import Architecture
from quire.kernels.gguf.architectures.encoders import BERT, NOMIC_BERT
from quire.kernels.gguf.architectures.gemma import GEMMA2, GEMMA3, GEMMA_EMBEDDING
from quire.kernels.gguf.architectures.gemma3n import GEMMA3N
from quire.kernels.gguf.architectures.gemma4 import GEMMA4
from quire.kernels.gguf.architectures.hybrids import (
    FALCON_H1,
    GRANITE_HYBRID,
    LFM2,
    LFM2MOE,
    NEMOTRON_H,
    NEMOTRON_H_MOE,
)
from quire.kernels.gguf.architectures.llama import GRANITE, LLAMA, SMOLLM3
from quire.kernels.gguf.architectures.llama_likes import APERTUS, ERNIE4_5, HUNYUAN_DENSE, MISTRAL3, SEED_OSS
from quire.kernels.gguf.architectures.mixtures import ERNIE4_5_MOE, GLM4_MOE, MINIMAX_M2
from quire.kernels.gguf.architectures.norms_after import EXAONE4
from quire.kernels.gguf.architectures.qwen import (
    OLMOE,
    QWEN2,
    QWEN2MOE,
    QWEN3,
    QWEN3MOE,
    QWEN3NEXT,
    QWEN35,
    QWEN35MOE,
)
from quire.kernels.gguf.metadata import Metadata

ARCHITECTURES: dict[str, Architecture] = {
    "apertus": APERTUS,
    "bert": BERT,
    "cohere2": COHERE2,
    "deepseek2": DEEPSEEK2,
    "ernie4_5": ERNIE4_5,
    "ernie4_5-moe": ERNIE4_5_MOE,
    "exaone4": EXAONE4,
    "falcon-h1": FALCON_H1,
    "gemma-embedding": GEMMA_EMBEDDING,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma3n": GEMMA3N,
    "gemma4": GEMMA4,
    "glm4": GLM4,
    "glm4moe": GLM4_MOE,
    "gpt-oss": GPT_OSS,
    "gpt2": GPT2,
    "granite": GRANITE,
    "granitehybrid": GRANITE_HYBRID,
    "hunyuan-dense": HUNYUAN_DENSE,
    "lfm2": LFM2,
    "lfm2moe": LFM2MOE,
    "llama": LLAMA,
    "minimax-m2": MINIMAX_M2,
    "mistral3": MISTRAL3,
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H_MOE,
    "nomic-bert": NOMIC_BERT,
    "olmo2": OLMO2,
    "olmoe": OLMOE,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen2moe": QWEN2MOE,
    "qwen3": QWEN3,
    "qwen35": QWEN35,
    "qwen35moe": QWEN35MOE,
    "qwen3moe": QWEN3MOE,
    "qwen3next": QWEN3NEXT,
    "seed_oss": SEED_OSS,
    "smollm3": SMOLLM3,
    "starcoder2": STARCODER2,
}
"""Architectures by `general.architecture`."""


def architecture_of(metadata: Metadata) -> Architecture:
    """Return the architecture of a file. Raises ModelError for one that is not supported."""
    name = metadata.architecture
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        raise ModelError(
            f"the GGUF file has general.architecture {repr(name)[:80]}; supported in GGUF files are "
            f"{', '.join(ARCHITECTURES)}; take the model's safetensors for others"
        )
    return next((variant for holds, variant in found.variants if holds(metadata)), found)
