"""Autoscaling by tokens: as many replicas as the tokens of the open requests need."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

TOKENS = "tokens"
"""Name of the metric that each replica reports: tokens of its open requests, of prompts and answers."""


class TokenPolicy:
    """A policy of Ray Serve's autoscaling, which bounds and delays what it wants as for any policy."""

    def __init__(self, target_tokens: int) -> None:
        self._target = target_tokens

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas that the tokens need, `target_tokens` for each."""
        reported = (context.aggregated_metrics or {}).get(TOKENS, {})
        return math.ceil(sum(reported.values()) / self._target), {}
