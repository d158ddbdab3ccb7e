"""What of a request the runner needs to know: its tokens, and how the next one is sampled, or these are pooled."""

from __future__ import annotations

from quire.engine_core.request import Request
from quire.kernels.runner import PoolingConfig, SamplingConfig, Sequences

_INT32_MAX = 2**31 - 1


def open_sequence(sequences: Sequences, request: Request, token_ids: list[int] | None = None) -> int:
    """Open a slot with the prompt, or these tokens, and the sampling state of `request`, without pages.

    Raises ValueError if it is not available.
    """
    return sequences.open(
        request.prompt_token_ids if token_ids is None else token_ids,
        request.num_prompt_tokens,
        sampling=sampling_config(request),
        cache_salt=request.cache_salt,
        pooling=pooling_config(request),
        constraint=request.constraint,
    )


def pooling_config(request: Request) -> PoolingConfig | None:
    """Return the native configuration of a request whose prompt is pooled, None for others."""
    if (pooling := request.pooling) is None:
        return None
    return PoolingConfig(type=pooling.pooling_type, normalize=pooling.normalize, dimensions=pooling.dimensions or 0)


def sampling_config(request: Request) -> SamplingConfig:
    """Return the native configuration of a request: empty lists for None, eos tokens among those that stop."""
    sampling, search = request.sampling, request.search
    return SamplingConfig(
        temperature=sampling.temperature if search is None else 0.0,  # the search replaces what is sampled
        top_k=min(sampling.top_k, _INT32_MAX),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=list((sampling.logit_bias or {}).items()),
        allowed_token_ids=sampling.allowed_token_ids or [],
        bad_words_token_ids=sampling.bad_words_token_ids or [],
        stop_token_ids=sorted(request.stop_token_ids),
        min_tokens=sampling.min_tokens,
        seed=request.seed,
        logprobs=sampling.logprobs if search is None else search.num_candidates,
        prompt_logprobs=sampling.prompt_logprobs,
    )
