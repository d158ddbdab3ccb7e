"""The sizes of an engine: its limits, and what those need who simulate one like it."""

from __future__ import annotations

from typing import Annotated

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Size = Annotated[float, msgspec.Meta(gt=0)]


class EngineShape(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """What an engine was started with, by its model, its KV pool and its arguments."""

    vocab_size: _Count
    max_model_len: _Count
    max_num_seqs: _Count
    max_num_batched_tokens: _Count
    page_size: _Count
    num_pages: _Count
    attention_context: _Size = 4096.0  # tokens whose attention costs a token as much as all else
    enable_prefix_caching: bool = True
    policy: str = "fcfs"  # one of the engine's policies
    long_prefill_threshold: _Count | None = None  # tokens of one prompt in a step; None: by what it costs the others
    max_waiting_requests: _Count = 4096
    max_waiting_tokens: _Count = 1 << 24
    hidden_size: Annotated[int, msgspec.Meta(ge=0)] = 0  # values of an embedding
