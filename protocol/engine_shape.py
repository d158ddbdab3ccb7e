"""The sizes of an engine, for those who want to simulate one like it."""

from __future__ import annotations

import msgspec


class EngineShape(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """What an engine was started with; names and meanings are those of its limits."""

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
