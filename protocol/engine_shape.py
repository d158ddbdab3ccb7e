"""The sizes of an engine: its limits, and what a simulation of one like it needs."""

from __future__ import annotations

from typing import Annotated

import msgspec

from quire.protocol.pooling_info import PoolingInfo

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Size = Annotated[float, msgspec.Meta(gt=0)]


class EngineShape(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The sizes of a running engine, by its model, its KV cache and its options, whose names they have."""

    vocab_size: _Count
    max_model_len: _Count
    max_num_seqs: _Count
    max_num_batched_tokens: _Count
    block_size: _Count
    num_pages: _Count
    attention_context: _Size = 4096.0  # context length at which attention costs a token as much as all else
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    target_itl: Annotated[float, msgspec.Meta(ge=0)] = 25.0  # milliseconds
    long_prefill_token_threshold: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_waiting_requests: _Count = 4096
    max_waiting_tokens: _Count = 1 << 24
    hidden_size: Annotated[int, msgspec.Meta(ge=0)] = 0  # values of an embedding
    max_waiting_requests_per_client: _Count | None = None
    pooling: PoolingInfo = PoolingInfo()
    num_states: Annotated[int, msgspec.Meta(ge=0)] = 0  # records of state; 0 if the model has no state

    @property
    def tile(self) -> int:
        """Tokens of an attention tile: chunks that end with a tile waste nothing, and smaller ones do not pay."""
        return min(self.block_size, 32)

    @property
    def pool_tokens(self) -> int:
        """Tokens that all KV pages together hold."""
        return self.num_pages * self.block_size

    def pages_for(self, num_tokens: int) -> int:
        """Return how many KV pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def pages_of_sequences(self, num_prompt_tokens: int, num_tokens: int, num_sequences: int) -> int:
        """Return the pages of sequences of `num_tokens` each, which share the full pages of their prompt."""
        shared = num_prompt_tokens // self.block_size if num_sequences > 1 else 0
        return shared + num_sequences * (self.pages_for(num_tokens) - shared)
