"""Dot products of four bytes in each lane of 32 bits. They are exact, so every instruction set gives the same bits.

x86 multiplies unsigned bytes of weights by signed ones of x (`vpdpbusd`). NEON multiplies signed ones: by SDOT with
`neon-dotprod`; otherwise products are 16-bit (SMULL), neighbours add up to less than 2^15 (ADDP), and pairs of these
are added to the sums (SADALP).
"""

from __future__ import annotations

from quire.kernels.emit.builder import I8, I16, I32, Builder, Value, lanes_of, vector


def is_neon(isa: str) -> bool:
    """Return True for instruction sets of ARM, whose registers have four lanes and whose bytes are signed."""
    return isa.startswith("neon")


def is_narrow(isa: str) -> bool:
    """Return True if the registers hold the sums of few rows: 16 of 8 lanes (AVX2), or 32 of 4 (NEON)."""
    return isa.startswith("avx2") or is_neon(isa)


def has_dots(isa: str) -> bool:
    """Return True if `add_dots` knows the instruction set: all but those of x86 without VNNI."""
    return isa not in ("avx512", "avx2")


def add_dots(b: Builder, isa: str, acc: Value, weights: Value, x: Value) -> Value:
    """Add the sum of `weights` times `x`, four bytes each, to every lane of `acc`; 8 lanes or 16."""
    width = 4 if is_neon(isa) else 8 if isa == "avx2-vnni" else 16
    if lanes_of(acc.type) > width:
        return b.join(*(add_dots(b, isa, *(b.half(value, i) for value in (acc, weights, x))) for i in range(2)))
    operands = [b.lanes_as(weights, I8), b.lanes_as(x, I8)]
    if isa == "neon-dotprod":
        return b.call("llvm.aarch64.neon.sdot.v4i32.v16i8", [acc, *operands], acc.type)
    if isa != "neon":
        return b.call(f"llvm.x86.avx512.vpdpbusd.{width * 32}", [acc, *operands], acc.type)
    products = b.convert("arith.extsi", operands[0], vector(I16)) * b.convert("arith.extsi", operands[1], vector(I16))
    even, odd = (b.shuffle(products, products, range(parity, 16, 2)) for parity in range(2))
    return acc + b.call("llvm.aarch64.neon.saddlp.v4i32.v8i16", [even + odd], acc.type)


def look_up(b: Builder, isa: str, table: tuple[int, ...], codes: Value) -> Value:
    """Return the entry of a table of 16 bytes for every byte of 16 lanes, each of which is below 16."""
    if is_neon(isa):
        name, parts = "aarch64.neon.tbl1.v16i8", 4
    else:
        name, parts = ("x86.avx2.pshuf.b", 2) if is_narrow(isa) else ("x86.avx512.pshuf.b.512", 1)
    return _looked_up(b, name, b.table(table * (4 // parts), I8), codes, parts)


def _looked_up(b: Builder, name: str, table: Value, codes: Value, parts: int) -> Value:
    """Emit `look_up` for vectors that consist of so many registers."""
    if parts > 1:
        return b.join(*(_looked_up(b, name, table, b.half(codes, i), parts // 2) for i in range(2)))
    found = b.call(f"llvm.{name}", [table, b.lanes_as(codes, I8)], table.type)
    return b.lanes_as(found, I32)
