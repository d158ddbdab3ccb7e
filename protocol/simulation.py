"""What crosses between a command that simulates engines and the process that does it, and what calibration writes."""

from __future__ import annotations

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
