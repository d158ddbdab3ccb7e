"""One request of a workload."""

from __future__ import annotations

from typing import Any

import msgspec

BLOCK_TOKENS = 512
"""Tokens of a prompt's block unless the trace says otherwise (Mooncake's)."""


class WorkloadRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that arrives `arrival` seconds after the workload begins; lengths in tokens.

    `blocks` name the blocks of its prompt, each of `block_tokens` tokens except the last, which is cut to the prompt's
    length: prompts that begin with equal blocks begin with equal tokens. `text` or `messages`, where a trace has them,
    are sent in place of synthetic tokens.

    A request of a `session` is sent `delay` seconds after the end of the session's previous request at the earliest.
    `params` are fields of `SamplingParams`, where the recording has them.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    block_tokens: int = BLOCK_TOKENS
    session: str | None = None
    delay: float = 0.0
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    params: dict[str, Any] | None = None
