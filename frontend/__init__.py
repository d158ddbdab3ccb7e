"""The user interface: `LLM`, `AsyncLLM`, their parameters and outputs.

Names are imported on first use, so that commands that need few of them start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.frontend.async_llm import AsyncLLM
    from quire.frontend.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from quire.frontend.engine_args import EngineArgs
    from quire.frontend.errors import (
        EngineConnectionError,
        EngineDeadError,
        EngineStartError,
        HubError,
        RequestError,
        RequestTimeoutError,
    )
    from quire.frontend.llm import LLM
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
        ScoringOutput,
        ScoringRequestOutput,
    )
    from quire.frontend.structured_outputs import StructuredOutputsParams
    from quire.frontend.text.chat.assistant import AssistantMessage, ToolCall
    from quire.frontend.text.chat.tools import ToolError, check_tools
    from quire.frontend.text.prompts import PromptType, TextPrompt, TokensPrompt
    from quire.protocol.messages import PoolingParams, SamplingParams

__all__ = [
    "LLM",
    "AssistantMessage",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConnectionError",
    "EngineDeadError",
    "EngineStartError",
    "HubError",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestTimeoutError",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "ToolCall",
    "ToolError",
    "check_tools",
]

_NAMES_OF_MODULES = {
    "quire.frontend.async_llm": ("AsyncLLM",),
    "quire.frontend.beam_search": ("BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"),
    "quire.frontend.text.chat.assistant": ("AssistantMessage", "ToolCall"),
    "quire.frontend.text.chat.tools": ("ToolError", "check_tools"),
    "quire.frontend.engine_args": ("EngineArgs",),
    "quire.frontend.errors": (
        "EngineConnectionError",
        "EngineDeadError",
        "EngineStartError",
        "HubError",
        "RequestError",
        "RequestTimeoutError",
    ),
    "quire.frontend.llm": ("LLM",),
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
        "ScoringOutput",
        "ScoringRequestOutput",
    ),
    "quire.frontend.text.prompts": ("PromptType", "TextPrompt", "TokensPrompt"),
    "quire.frontend.structured_outputs": ("StructuredOutputsParams",),
    "quire.protocol.messages": ("PoolingParams", "SamplingParams"),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES_OF_MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
