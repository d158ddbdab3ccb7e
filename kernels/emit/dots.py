"""Dot products of four bytes in each lane of 32 bits. They are exact, so every instruction set gives the same bits.

x86 multiplies unsigned bytes of weights by signed ones of x (`vpdpbusd`). NEON multiplies signed ones: by SDOT with
`neon-dotprod`; otherwise products are 16-bit (SMULL), neighbours add up to less than 2^15 (ADDP), and pairs of these
are added to the sums (SADALP). A GPU multiplies unsigned bytes by signed ones, lane by lane (`dp4a`).
"""

from __future__ import annotations

from quire.kernels.emit.builder import I8, I16, I32, Builder, Value, lanes_of, vector

CUDA = "cuda"
"""Name of the instruction set of NVIDIA's GPUs, whose threads have registers of 32 bits."""


def is_neon(isa: str) -> bool:
    """Return True for instruction sets of ARM, whose registers have four lanes and whose bytes are signed."""
    return isa.startswith("neon")


def is_narrow(isa: str) -> bool:
    """Return True if the registers hold the sums of few rows: 16 of 8 lanes (AVX2), 32 of 4 (NEON), or 255 of one (a
    thread of a GPU)."""
    return isa.startswith("avx2") or is_neon(isa) or isa == CUDA


def has_dots(isa: str) -> bool:
    """Return True if `add_dots` knows the instruction set: all but those of x86 without VNNI."""
    return isa not in ("avx512", "avx2")


def add_dots(b: Builder, isa: str, acc: Value, weights: Value, x: Value) -> Value:
    """Add the sum of `weights` times `x`, four bytes each, to every lane of `acc`; 8 lanes or 16."""
    if isa == CUDA:
        return b.by_lane(lambda *lanes: b.call("llvm.nvvm.idp4a.u.s", lanes, I32), weights, x, acc)
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
    if isa == CUDA:
        return _looked_up_by_bytes(b, table, codes)
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


def _looked_up_by_bytes(b: Builder, table: tuple[int, ...], codes: Value) -> Value:
    """Emit `look_up` by `prmt`, which chooses four of eight bytes by the lower three bits of four nibbles."""
    words = [_signed(int.from_bytes(bytes(table[i : i + 4]), "little")) for i in range(0, 16, 4)]
    nibbles = (codes | codes >> 4) & 0x00FF00FF
    chosen = (nibbles | nibbles >> 8) & 0x7777
    is_high = (codes >> 3 & 0x01010101) * 0xFF

    def look(low: int) -> Value:
        pair = [b.constant(word, I32) for word in words[low : low + 2]]
        return b.by_lane(lambda lane: b.call("llvm.nvvm.prmt", [*pair, lane], I32), chosen)

    return look(0) & (is_high ^ -1) | look(2) & is_high


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
