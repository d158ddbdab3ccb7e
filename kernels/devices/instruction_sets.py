"""Instruction sets of CPUs, and the choice of one that this host can run."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from quire.kernels._native import adds_pairs_by_fma, host_features, pair_products_cost, request_amx
from quire.kernels.emit.builder import BF16, F32
from quire.kernels.emit.context import Capabilities
from quire.kernels.emit.layout import PAIRED
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
    bf16_activations: str = F32

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities by which plans for it are lowered and kernels emitted."""
        return Capabilities(self.name, self.bf16_activations)


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _AVX512 | {"avx512vnni"}
_AMX = _VNNI | {"amx-tile", "amx-bf16", "amx-int8"}
_NEON = frozenset({"neon"})

INSTRUCTION_SETS = {
    isa.name: isa
    for isa in (
        InstructionSet("amx", "x86-64-v4", "+avx512vnni,+amx-tile,+amx-bf16,+amx-int8", 512, _AMX, BF16),
        InstructionSet("avx512-bf16", "x86-64-v4", "+avx512vnni,+avx512bf16", 512, _VNNI | {"avx512bf16"}, PAIRED),
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
