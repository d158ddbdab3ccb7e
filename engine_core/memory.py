"""The memory that requests take: bounded as they come, and watched while they run.

Each open request counts with an estimate from its message, and all of them together stay within a part of the reserve
of the memory plan. Should the process come near its ceiling nonetheless, it gives back what it can do without and
rejects new requests until it is below again. Open requests go on; with none open, one is accepted whatever is measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from quire.kernels.runner import MemoryPlan
from quire.protocol.messages import EngineCoreRequest
from quire.protocol.resident_memory import ResidentMemory, trim_heap

_REQUEST_BYTES = 4096  # objects of a request, and what its client is owed
_TOKEN_BYTES = 44  # a Python int in a list, and an int32 in the executor
_CHAR_BYTES = 8  # of a grammar, as objects of JSON; of the path of an adapter, which may be kept in two spellings
_CHECK_SECONDS = 0.1
_SHED_SECONDS = 5.0  # between two times that memory is given back, since that may take milliseconds

logger = logging.getLogger(__name__)


def estimate_bytes(message: EngineCoreRequest) -> int:
    """Return about the memory that the message of a request takes until it has ended.

    What a running request adds, such as prompt_logprobs, grows with the tokens in its KV pages, so these bound it.
    """
    sampling = message.sampling_params
    num_tokens = len(message.prompt_token_ids) + len(message.generated_token_ids) + len(message.eos_token_ids)
    num_tokens += len(message.predicted_token_ids)
    num_tokens += len(sampling.stop_token_ids or ()) + len(sampling.allowed_token_ids or ())
    num_tokens += 3 * len(sampling.logit_bias or ()) + sum(3 + len(word) for word in sampling.bad_words_token_ids or ())
    num_bytes = _REQUEST_BYTES + num_tokens * _TOKEN_BYTES + _CHAR_BYTES * len(message.adapter)
    if sampling.structured_outputs is not None:
        num_bytes += _CHAR_BYTES * len(msgspec.msgpack.encode(sampling.structured_outputs))
    return num_bytes


class MemoryGuard:
    """Keeps an engine's process below its ceiling. `is_full` may be asked by any thread."""

    def __init__(
        self,
        plan: MemoryPlan,
        *,
        read: Callable[[], int] | None = None,
        trim: Callable[[], None] = trim_heap,
    ) -> None:
        """`read` returns the resident bytes of the process; `trim` gives back what is free in it."""
        self.limit = plan.resident_limit
        self._planned = plan.limit
        self._read = read or ResidentMemory().read
        self.resident = self._read()
        self.is_full = False
        self.request_bytes = plan.reserve // 2  # most of all open requests
        self.backlog_bytes = plan.reserve // 4  # most of all outputs that wait for slow clients
        self.grammar_bytes = plan.reserve // 4  # most of all compiled grammars
        self.num_sheddings = 0
        self._high = plan.high
        self._trim = trim
        self._next_check = 0.0
        self._next_shedding = 0.0

    def check(self, now: float, evict: Callable[[], None], *, is_idle: bool) -> None:
        """Measure, from time to time. Near the ceiling call `evict`, and be full if that does not help."""
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_SECONDS
        self.resident = self._read()
        if self.resident > self._high and now >= self._next_shedding:
            self._next_shedding = now + _SHED_SECONDS
            self.num_sheddings += 1
            logger.warning("%d of %d bytes of memory are taken; evicting what can be", self.resident, self.limit)
            evict()
            self._trim()
            self.resident = self._read()
        self.is_full = self.resident > self._high and not is_idle

    def stats(self) -> dict[str, int]:
        """Return the state as it is now, for the utility call `stats`."""
        return {"resident_bytes": self._read(), "memory_limit": self._planned, "memory_sheddings": self.num_sheddings}

    @property
    def words(self) -> str:
        """State of the memory, for an error."""
        return f"{self.resident} of {self.limit} bytes are taken"
