"""The sizes of an engine: its limits, and what those need who simulate one like it."""

from __future__ import annotations

import msgspec


class EngineShape(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """What an engine was started with, by its model, its KV pool and its arguments."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int
    attention_context: float = 4096.0  # tokens whose attention costs a token as much as all else
    enable_prefix_caching: bool = True
    policy: str = "fcfs"  # one of the engine's policies
    long_prefill_threshold: int | None = None  # tokens of one prompt in a step; None: by what it costs the others
    max_waiting_requests: int = 4096
    max_waiting_tokens: int = 1 << 24
    hidden_size: int = 0  # values of an embedding
