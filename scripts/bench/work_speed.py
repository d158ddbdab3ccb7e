"""Speed of a work: a step with the prompts of some sequences, and steps that decode after it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkSpeed:
    """Seconds of a prefill and of a decode step of sequences with prompts of so many tokens, by a model whose weights
    have so many bytes. A step of one sequence reads all weights once.
    """

    sequences: int
    length: int
    prefill: float
    decode: float
    weight_bytes: int

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return self.sequences * self.length

    def is_like(self, other: WorkSpeed) -> bool:
        """Return whether both have as many sequences and tokens."""
        return (self.sequences, self.length) == (other.sequences, other.length)

    def __str__(self) -> str:
        return (
            f"{self.sequences} x {self.length} tokens: prefill {self.num_prompt_tokens / self.prefill:,.0f} tokens/s, "
            f"a decode step {self.decode * 1e3:.2f} ms, {self.sequences / self.decode:,.0f} tokens/s, weights at "
            f"{self.weight_bytes / self.decode / 1e9:,.1f} GB/s"
        )
