"""What one engine of a fleet had to do of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from quire.frontend.evaluation.replay.record import RequestRecord


@dataclass
class EngineShare:
    """Requests that were sent to an engine, however they ended, and their tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def add(self, record: RequestRecord) -> None:
        """Count a request."""
        self.requests += 1
        self.prompt_tokens += record.prompt_tokens
        self.cached_tokens += record.cached_tokens or 0
        self.output_tokens += record.output_tokens

    def told(self) -> dict[str, int]:
        """The counts by name, for JSON."""
        return asdict(self)
