"""The executor over `quire.kernels`."""

from __future__ import annotations

from typing import Any

from quire.engine_core.request import Request
from quire.kernels.runner import ModelRunner

_INT32_MAX = 2**31 - 1


class NativeExecutor:
    """One process, the whole model: the runner's methods, with requests in its terms."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.reserve = runner.reserve
        self.release_pages = runner.release_pages
        self.close = runner.close
        self.execute = runner.step

    @property
    def free_pages(self) -> int:
        """Pages that `reserve` can hand out."""
        return self._runner.free_pages

    @property
    def held_pages(self) -> int:
        """Pages of open slots."""
        return self._runner.held_pages

    @property
    def cached_pages(self) -> int:
        """Pages that no slot holds but whose contents are kept."""
        return self._runner.cached_pages

    def open(self, request: Request) -> int:
        """A slot with the prompt and the sampling state of `request`, without pages."""
        return self._runner.open(request.prompt_token_ids, request.num_prompt_tokens, **sampling_arguments(request))


def sampling_arguments(request: Request) -> dict[str, Any]:
    """The keyword arguments of `ModelRunner.open`: empty lists or -1 for None, eos tokens among those that stop."""
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
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
        "logprobs": -1 if sampling.logprobs is None else sampling.logprobs,
        "prompt_logprobs": -1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs,
    }
