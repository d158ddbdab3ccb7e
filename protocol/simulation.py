"""What crosses between a command that simulates engines and the process that does it, and what calibration writes."""

from __future__ import annotations

import msgspec


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


class EngineShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sizes that an engine was started with; names and meanings are those of its limits."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int
    attention_context: float = 4096.0
    enable_prefix_caching: bool = True
    policy: str = "fcfs"
    long_prefill_threshold: int | None = None
    max_waiting_requests: int = 4096
    max_waiting_tokens: int = 1 << 24


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
