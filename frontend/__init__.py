"""The user interface: `LLM`, `AsyncLLM`, their parameters and outputs.

Names are imported on first use, so that commands that need few of them start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.frontend.async_llm import AsyncLLM, AsyncLLMEngine
    from quire.frontend.beam_search import BeamSearchOutput, BeamSearchSequence
    from quire.frontend.engine_args import AsyncEngineArgs, EngineArgs
    from quire.frontend.errors import (
        EngineConnectionError,
        EngineDeadError,
        EngineStartError,
        HubError,
        RequestError,
        RequestTimeoutError,
    )
    from quire.frontend.llm import LLM
    from quire.frontend.llm_engine import LLMEngine
    from quire.frontend.lora_request import LoRARequest
    from quire.frontend.metrics.reader import Counter, Gauge, Histogram, Metric, Vector
    from quire.frontend.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestMetrics,
        RequestOutput,
        RequestOutputKind,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from quire.frontend.request_params import (
        BeamSearchParams,
        PoolingParams,
        SamplingParams,
        StructuredOutputsParams,
    )
    from quire.frontend.text.chat.assistant import AssistantMessage, ToolCall
    from quire.frontend.text.chat.tools import ToolError, check_tools
    from quire.frontend.text.prompts import PromptType, TextPrompt, TokensPrompt
    from quire.frontend.vllm.names import AttentionConfig, cleanup_dist_env_and_memory, get_tokenizer
    from quire.frontend.vllm.script_args import FlexibleArgumentParser

__all__ = [
    "LLM",
    "AssistantMessage",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "AttentionConfig",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "Counter",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConnectionError",
    "EngineDeadError",
    "EngineStartError",
    "FlexibleArgumentParser",
    "Gauge",
    "Histogram",
    "HubError",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "Metric",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestTimeoutError",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "ToolCall",
    "ToolError",
    "Vector",
    "check_tools",
    "cleanup_dist_env_and_memory",
    "get_tokenizer",
]

_NAMES_OF_MODULES = {
    "quire.frontend.async_llm": ("AsyncLLM", "AsyncLLMEngine"),
    "quire.frontend.beam_search": ("BeamSearchOutput", "BeamSearchSequence"),
    "quire.frontend.text.chat.assistant": ("AssistantMessage", "ToolCall"),
    "quire.frontend.text.chat.tools": ("ToolError", "check_tools"),
    "quire.frontend.engine_args": ("AsyncEngineArgs", "EngineArgs"),
    "quire.frontend.errors": (
        "EngineConnectionError",
        "EngineDeadError",
        "EngineStartError",
        "HubError",
        "RequestError",
        "RequestTimeoutError",
    ),
    "quire.frontend.llm": ("LLM",),
    "quire.frontend.llm_engine": ("LLMEngine",),
    "quire.frontend.lora_request": ("LoRARequest",),
    "quire.frontend.metrics.reader": ("Counter", "Gauge", "Histogram", "Metric", "Vector"),
    "quire.frontend.outputs": (
        "ClassificationOutput",
        "ClassificationRequestOutput",
        "CompletionOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "Logprob",
        "PoolingOutput",
        "PoolingRequestOutput",
        "RequestMetrics",
        "RequestOutput",
        "RequestOutputKind",
        "ScoringOutput",
        "ScoringRequestOutput",
    ),
    "quire.frontend.text.prompts": ("PromptType", "TextPrompt", "TokensPrompt"),
    "quire.frontend.request_params": ("BeamSearchParams", "PoolingParams", "SamplingParams", "StructuredOutputsParams"),
    "quire.frontend.vllm.script_args": ("FlexibleArgumentParser",),
    "quire.frontend.vllm.names": ("AttentionConfig", "cleanup_dist_env_and_memory", "get_tokenizer"),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES_OF_MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
