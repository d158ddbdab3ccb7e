"""Devices, which compute models: what the rest of this package asks of one. cpu.py and cuda.py have those there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from quire.kernels import _native
from quire.kernels.emit.context import Capabilities, EmitContext, Kernel


class Device(Protocol):
    """A device for one model, whose memory and compiled kernels it owns."""

    @property
    def name(self) -> str:
        """Name by which it is chosen: cpu, or as cuda:0."""

    @property
    def product(self) -> str:
        """Name of the hardware; empty for the CPUs."""

    @property
    def in_host_memory(self) -> bool:
        """True if it computes in the memory of this process, which may be that of files."""

    @property
    def own_memory(self) -> int | None:
        """Bytes of its own memory, whoever has them; None if it computes in the host's."""

    @property
    def thread_memory(self) -> int:
        """Bytes of its own memory that threads of the compiled kernels take, beside weights, buffers and KV pages."""

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities by which plans are lowered and kernels emitted."""

    @property
    def native(self) -> _native.Device:
        """The memory that kernels read and write, and launches over it. Raises ModelError if there is none."""

    @property
    def compiled(self) -> int:
        """Number of kernels that the cache did not have."""

    @property
    def rejected(self) -> list[str]:
        """Entries of the cache that were compiled again, each with the reason."""

    def compile(self, kernels: Iterable[Kernel], context: EmitContext) -> Iterator[int]:
        """Yield the numbers by which launches name kernels, in order, as they are compiled."""

    def available_memory(self) -> int:
        """Return the bytes that weights, buffers and KV pages may take."""
