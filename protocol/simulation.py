"""What crosses between a command that simulates engines and the process that does it, and what calibration writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from quire.protocol.engine_shape import EngineShape


class StepTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of an engine's step, from its begin to the next one's: a sum over what the step computes.

    So much for itself, for each token of a prompt, for each sequence that decodes, for each token of KV memory that is
    read, and for the square of each chunk of a prompt, whose tokens attend to each other.
    """

    base: float
    prefill_token: float
    decode: float
    kv_token: float = 0.0
    prefill_squared: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """What a step of this work takes."""
        return (
            self.base
            + self.prefill_token * work.prefill_tokens
            + self.decode * work.decodes
            + self.kv_token * work.kv_tokens
            + self.prefill_squared * work.prefill_squares
        )


class ClientTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds between a client and its engine: from the sending of a request to its place in the queue, and from the
    end of a step to the client that has its tokens.
    """

    to_engine: float = 0.0
    to_client: float = 0.0


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast an engine is on a host, as `quire calibrate` measures it and keeps it as JSON.

    `error`: the median of |model - measured| / measured over the steps that it was fitted to; `steps`: how many.
    """

    model: str
    host: str
    date: str
    engine: EngineShape
    step: StepTime
    client: ClientTime = ClientTime()
    steps: int = 0
    error: float = 0.0


class StepWork(NamedTuple):
    """What a step computes, as `StepTime` counts it; a sequence that computes one token decodes."""

    prefill_tokens: int
    decodes: int
    kv_tokens: int  # before those that are computed, of all sequences
    prefill_squares: int

    @classmethod
    def of(cls, starts: Sequence[int], counts: Sequence[int]) -> StepWork:
        """Of a step that computes tokens `[start, start + count)` of each sequence."""
        decodes = counts.count(1)
        tokens, squares = sum(counts) - decodes, 0
        if tokens:
            squares = sum(count * count for count in counts if count > 1)
        return cls(tokens, decodes, sum(starts), squares)
