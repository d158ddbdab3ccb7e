"""What of a request the runner needs to know: its tokens, and how the next one is drawn, or these are pooled."""

from __future__ import annotations

from typing import Any

from quire.engine_core.request import Request
from quire.kernels.runner import Sequences

_INT32_MAX = 2**31 - 1


def open_sequence(sequences: Sequences, request: Request, token_ids: list[int] | None = None) -> int:
    """A slot with the prompt, or these tokens, and the sampling state of `request`, without pages.

    Raises ValueError if it cannot be had.
    """
    return sequences.open(
        request.prompt_token_ids if token_ids is None else token_ids,
        request.num_prompt_tokens,
        cache_salt=request.cache_salt,
        rule=request.constraint,
        **sampling_arguments(request),
        **pooling_arguments(request),
    )


def pooling_arguments(request: Request) -> dict[str, Any]:
    """The keyword arguments of `Sequences.open` for a request whose prompt is pooled."""
    if (pooling := request.pooling) is None:
        return {}
    return {
        "pooling": pooling.pooling_type,
        "normalize": pooling.normalize,
        "dimensions": pooling.dimensions or 0,
    }


def sampling_arguments(request: Request) -> dict[str, Any]:
    """The keyword arguments of `Sequences.open`: empty lists or -1 for None, eos tokens among those that stop."""
    sampling, search = request.sampling, request.search
    num_logprobs = -1 if sampling.logprobs is None else sampling.logprobs
    return {
        "temperature": sampling.temperature if search is None else 0.0,  # what is drawn, the search replaces
        "top_k": min(sampling.top_k, _INT32_MAX),
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": list((sampling.logit_bias or {}).items()),
        "allowed_token_ids": sampling.allowed_token_ids or [],
        "bad_words_token_ids": sampling.bad_words_token_ids or [],
        "stop_token_ids": sorted(request.stop_token_ids),
        "min_tokens": sampling.min_tokens,
        "seed": request.seed,
        "logprobs": num_logprobs if search is None else search.num_candidates,
        "prompt_logprobs": -1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs,
    }
