"""What users touch: `LLM`, `AsyncLLM`, and what goes into and comes out of them."""

from __future__ import annotations

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.engine_args import EngineArgs
from quire.frontend.errors import EngineConnectionError, EngineDeadError, EngineStartError, RequestError
from quire.frontend.llm import LLM
from quire.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from quire.frontend.prompts import PromptType, TextPrompt, TokensPrompt
from quire.protocol.messages import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineArgs",
    "EngineConnectionError",
    "EngineDeadError",
    "EngineStartError",
    "Logprob",
    "PromptType",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
]
