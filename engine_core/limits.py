"""The sizes that an engine was started with."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from quire.protocol.engine_shape import EngineShape


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the model, the KV pool and the arguments allow; fixed for the engine's life."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int
    attention_context: float = 4096.0  # tokens whose attention costs a token as much as all else
    enable_prefix_caching: bool = True
    policy: str = "fcfs"  # one of policies.POLICIES
    long_prefill_threshold: int | None = None  # tokens of one prompt in a step; None: by what it costs the others
    max_waiting_requests: int = 4096
    max_waiting_tokens: int = 1 << 24
    hidden_size: int = 0  # values of an embedding

    @property
    def shape(self) -> EngineShape:
        """The same for clients."""
        values = asdict(self)
        del values["hidden_size"]
        return EngineShape(**values)

    @property
    def tile(self) -> int:
        """Tokens of a tile of attention: chunks that end with one waste nothing, and smaller ones don't pay."""
        return min(self.page_size, 32)

    @property
    def pool_tokens(self) -> int:
        """Positions that all KV pages together hold."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """KV pages that hold `num_tokens` positions."""
        return -(-num_tokens // self.page_size)
