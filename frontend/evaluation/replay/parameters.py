"""The sampling parameters with which a request is sent."""

from __future__ import annotations

from typing import Any

from quire.frontend.evaluation.workload.request import WorkloadRequest

# What would change how long an answer is, how many there are, or what comes back of it.
_LENGTHS = (
    "n", "best_of", "beam_width", "length_penalty", "early_stopping", "stop", "stop_token_ids",
    "include_stop_str_in_output", "min_tokens", "max_tokens", "ignore_eos", "bad_words", "detokenize",
)  # fmt: skip


def parameters_of(request: WorkloadRequest) -> dict[str, Any]:
    """Those of the recording, where what it does not tell is at its default; or greedy, where there is no recording.

    The answer has exactly the tokens that the workload wants. `ignore_eos` alone makes it so long; with `min_tokens`
    logits would be masked in each step besides.
    """
    recorded = {"temperature": 0.0} if request.params is None else {"temperature": 1.0, **request.params}
    kept = {name: value for name, value in recorded.items() if name not in _LENGTHS}
    return {**kept, "max_tokens": request.output_tokens, "ignore_eos": True}
