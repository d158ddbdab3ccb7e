"""What a router knows of an engine: what it has sent there, and what has been answered."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.protocol.simulation import SimulatedRequest


@dataclass(slots=True)
class EngineLoad:
    """Requests without an end, and the prompt tokens that each of those without a first token is likely to compute."""

    in_flight: int = 0
    prefills: dict[int, int] = field(default_factory=dict)
    prefill_tokens: int = 0

    def sent(self, request: SimulatedRequest, tokens: int) -> None:
        """A request is on its way, with so many tokens to compute."""
        self.in_flight += 1
        self.prefills[request.index] = tokens
        self.prefill_tokens += tokens

    def first_token(self, request: SimulatedRequest) -> None:
        """Its prompt is computed."""
        self.prefill_tokens -= self.prefills.pop(request.index, 0)

    def ended(self, request: SimulatedRequest) -> None:
        """It has its answer, or a refusal."""
        self.in_flight -= 1
        self.first_token(request)
