"""The prefill budget of an encoder: tokens attend to later ones, so that a prompt is computed in one step, or waits."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine_core.scheduling.prefill_budget import P, PrefillBudget, PrefillRequest
from quire.protocol.engine_shape import EngineShape


class WholePrompts(PrefillBudget):
    """A budget that is shared in whole prompts. Every one of them fits a step that has no other."""

    def least_chunk(self, prompt: PrefillRequest) -> int:
        """Return the tokens of the prompt."""
        return prompt.num_new_tokens

    def share(self, prefills: Sequence[P], max_tokens: int, max_cost: float, now: float) -> list[tuple[P, int]]:
        """Return the prompts of the next step: the oldest one, then others as long as they fit, in order of start."""
        shares: list[tuple[P, int]] = []
        for prompt in sorted(prefills, key=lambda prompt: prompt.number):
            count = prompt.num_new_tokens
            cost = count * self.token_cost(count / 2)
            if shares and (count > max_tokens or cost > max_cost):
                continue
            shares.append((prompt, count))
            max_tokens -= count
            max_cost -= cost
        return shares


def prefill_budget_of(limits: EngineShape) -> PrefillBudget:
    """Return the budget for the kind of the engine's model."""
    return WholePrompts(limits) if limits.pooling.is_encoder else PrefillBudget(limits)
