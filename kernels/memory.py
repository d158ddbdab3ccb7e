"""The memory of an engine's process, planned before any of it is taken: its ceiling, and what shares it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.kernels.errors import MemoryShortageError

PROGRAM_BYTES = 256 << 20
"""The program itself: interpreter, libraries, compiled kernels, stacks, the tokenizer of grammars."""

_LEAST_RESERVE = 64 << 20
_MOST_RESERVE = 2 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of the process by purpose. `reserve` is for what grows and shrinks with the requests, and for adapters that
    take more than the `adapters` bytes planned for them.

    `on_device`: weights, buffers and KV pages lie in the memory of a device, and take none of the process. `host_tier`:
    what the tier below them may take of the host's, which counts, though it is not resident in the process.
    """

    weights: int
    buffers: int
    kv: int
    reserve: int
    on_device: bool = False
    program: int = PROGRAM_BYTES
    adapters: int = 0
    host_tier: int = 0

    @property
    def limit(self) -> int:
        """The ceiling: all that the process has of them, and the program."""
        return self.resident_limit + self.host_tier

    @property
    def resident_limit(self) -> int:
        """Bytes of the ceiling that may be resident in the process."""
        return (
            self.program
            + self.reserve
            + self.adapters
            + (0 if self.on_device else self.weights + self.buffers + self.kv)
        )

    @property
    def high(self) -> int:
        """Resident bytes, close below the ceiling, above which it gives back memory and takes no new requests."""
        return self.resident_limit - self.reserve // 8

    def measured(self, resident: int, memory_limit: int | None) -> MemoryPlan:
        """Return the plan of a process that has loaded a model into a device's memory, and has so many bytes resident.

        Raises MemoryShortageError if a `memory_limit` leaves too few for requests.
        """
        program = max(PROGRAM_BYTES, resident)
        if memory_limit is None:
            return replace(self, program=program)
        if memory_limit - program < _LEAST_RESERVE:
            raise MemoryShortageError(
                f"memory_limit={memory_limit} is below the {program + _LEAST_RESERVE} bytes that are needed beside the "
                f"device's memory: program {program}, requests {_LEAST_RESERVE}; raise it"
            )
        return replace(self, program=program, reserve=memory_limit - program)

    def with_host_tier(self, size: int, memory_limit: int | None) -> MemoryPlan:
        """Return the plan with a tier of so many bytes, which a `memory_limit` takes from what requests may have."""
        return replace(self, host_tier=size, reserve=self.reserve - (0 if memory_limit is None else size))

    def describe(self) -> str:
        """Return the parts in words."""
        place = " in the device's memory" if self.on_device else ""
        return (
            f"weights {self.weights}, buffers {self.buffers}, KV pages {self.kv}{place}, program {self.program}, "
            f"requests and their answers {self.reserve}{f', adapters {self.adapters}' if self.adapters else ''}"
            f"{f', KV pages in host memory {self.host_tier}' if self.host_tier else ''}"
        )


def reserve_within(limit: int) -> int:
    """Return the reserve of a process with this ceiling: an eighth of it, from 64 MiB to 2 GiB."""
    return min(max(limit // 8, _LEAST_RESERVE), _MOST_RESERVE)


def reserve_above(planned: int) -> int:
    """Return the reserve within the least ceiling of a process that plans these bytes besides."""
    return min(max(-(-planned // 7), _LEAST_RESERVE), _MOST_RESERVE)


def reserve_beside(left: int) -> int:
    """Return the reserve of a process without a ceiling of its own, where `left` bytes are free: half of them."""
    return min(max(left // 2, _LEAST_RESERVE), _MOST_RESERVE)
