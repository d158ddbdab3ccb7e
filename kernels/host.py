"""Capabilities of this machine: instruction sets, available memory, and the folder of compiled kernels."""

from __future__ import annotations

import functools
import logging
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.kernels._native import adds_pairs_by_fma, host_features, pair_products_cost, request_amx
from quire.kernels.cgroups import memory_left
from quire.kernels.errors import ModelError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InstructionSet:
    """An instruction set that kernels are emitted for: LLVM's CPU and features, and the features that the host needs.

    The target is fixed, not detected, so that the kernels of one instruction set are the same everywhere.
    """

    name: str
    cpu: str
    features: str
    vector_bits: int
    needs: frozenset[str]


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _AVX512 | {"avx512vnni"}
_AMX = _VNNI | {"amx-tile", "amx-bf16", "amx-int8"}
_NEON = frozenset({"neon"})

INSTRUCTION_SETS = {
    isa.name: isa
    for isa in (
        InstructionSet("amx", "x86-64-v4", "+avx512vnni,+amx-tile,+amx-bf16,+amx-int8", 512, _AMX),
        InstructionSet("avx512-bf16", "x86-64-v4", "+avx512vnni,+avx512bf16", 512, _VNNI | {"avx512bf16"}),
        InstructionSet("avx512-vnni", "x86-64-v4", "+avx512vnni", 512, _VNNI),
        InstructionSet("avx512", "x86-64-v4", "", 512, _AVX512),
        InstructionSet("avx2-vnni", "x86-64-v3", "+avxvnni", 256, _AVX2 | {"avxvnni"}),
        InstructionSet("avx2", "x86-64-v3", "", 256, _AVX2),
        InstructionSet("neon-dotprod", "generic", "+neon,+dotprod", 128, _NEON | {"dotprod"}),
        InstructionSet("neon", "generic", "+neon", 128, _NEON),
    )
}
"""Instruction sets by name, the best first."""

_WORTHWHILE_COST = 1.5
"""Cost of a `vdpbf16ps`, relative to an FMA, from which on FMAs are as fast: they need not pair the weights."""


def available_isas() -> list[str]:
    """Return the instruction sets that this host can run, the best first."""
    features = set(host_features())
    granted: dict[str, Callable[[], bool]] = {"amx": request_amx, "avx512-bf16": pairs_are_exact}
    names = [isa.name for isa in INSTRUCTION_SETS.values() if isa.needs <= features]
    return [name for name in names if name not in granted or granted[name]()]


@functools.cache
def pairs_are_exact() -> bool:
    """Return True if this host's `vdpbf16ps` adds as the numeric contract demands; log it otherwise."""
    exact = adds_pairs_by_fma()
    if not exact:
        logger.warning("this CPU's vdpbf16ps rounds in another way than FMAs; computing without it (avx512-bf16)")
    return exact


@functools.cache
def pairs_are_fast() -> bool:
    """Return True if this host multiplies faster with `vdpbf16ps` than with FMAs, each of half as many products."""
    return pair_products_cost() < _WORTHWHILE_COST


def choose_isa(name: str | None = None) -> InstructionSet:
    """Return the instruction set `name`, or `QUIRE_ISA`, or the best. Raises ModelError if the host cannot run it.

    The best is the first one that is available, but `avx512-bf16` only where it is fast.
    """
    available = available_isas()
    if not available:
        raise ModelError(
            f"this CPU lacks features that every kernel needs ({', '.join(sorted(_AVX2))} on x86-64, neon on aarch64); "
            "Quire cannot run here"
        )
    best = next(isa for isa in available if isa != "avx512-bf16" or pairs_are_fast())
    chosen = name or os.environ.get("QUIRE_ISA") or best
    if chosen not in available:
        raise ModelError(f"instruction set {chosen!r} is not available here; choose one of {', '.join(available)}")
    return INSTRUCTION_SETS[chosen]


def cache_folder(chosen: str | None = None) -> Path:
    """Return the folder of compiled kernels: `chosen`, or `QUIRE_CACHE_DIR`, or the user's cache folder."""
    base = chosen or os.environ.get("QUIRE_CACHE_DIR")
    if base:
        return Path(base)
    return user_cache() / "kernels"


def user_cache() -> Path:
    """Return the folder of all that is kept for a user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"


def describe_address_limit() -> str:
    """Return words about the limit of this process's address space; none without a limit."""
    limit = _address_limit()
    return "" if limit is None else f" (`ulimit -v` limits the address space to {limit} bytes; raise it)"


def _address_limit() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


_SPARE_BYTES = 512 << 20
"""Address space that stacks, arenas of malloc, the compiler and the sockets take after the model is loaded."""


def available_memory() -> int:
    """Return the bytes available without swapping: the system's, limited by the cgroup, its parents and `ulimit -v`."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    space = _address_space()
    return min([available, *memory_left(), *([] if space is None else [space])])


def _address_space() -> int | None:
    """Return the bytes left of this process's address space beyond the spare ones; None without a limit."""
    if (limit := _address_limit()) is None:
        return None
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return max(0, limit - used - _SPARE_BYTES)
