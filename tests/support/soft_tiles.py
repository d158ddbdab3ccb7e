"""AMX tiles, `vdpbf16ps`, VNNI, NEON and a GPU's integers in software, to run kernels and compare their bits elsewhere.

The tile intrinsics of a kernel's MLIR become calls of a small C library. Tiles are handles into a ring that is much
longer than the number of live tiles of a kernel. `tdpbf16ps` adds in the order of the instruction: per output, one FMA
chain over even k and one over odd k, each from zero, then C += even + odd. `vdpbf16ps` adds the product of the upper
halves, then that of the lower ones, each by an FMA.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path

import pytest

from quire.kernels import _native
from quire.kernels.devices import cpu, instruction_sets
from quire.kernels.devices.instruction_sets import INSTRUCTION_SETS

IN_SOFTWARE = ("amx", "avx2-vnni", "neon-dotprod", "neon", "cuda") if os.uname().machine == "x86_64" else ()
"""Instruction sets whose quantized products are emulated where the host lacks them."""

SOURCE = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>
typedef union { float f[16][16]; int32_t i[16][16]; uint16_t h[16][32]; uint8_t b[16][64]; } Tile;
enum { RING = 1024 };
static _Thread_local Tile ring[RING];
static _Thread_local int64_t next;
static int64_t fresh(void) { int64_t t = next++ % RING; memset(&ring[t], 0, sizeof(Tile)); return t; }
static float wide(uint16_t h) { uint32_t u = (uint32_t)h << 16; float f; memcpy(&f, &u, 4); return f; }
int64_t soft_tilezero(int16_t rows, int16_t bytes) { (void)rows; (void)bytes; return fresh(); }
int64_t soft_tileloadd64(int16_t rows, int16_t bytes, const char *p, int64_t stride) {
  int64_t t = fresh();
  for (int r = 0; r < rows; r++) memcpy(ring[t].b[r], p + r * stride, bytes);
  return t;
}
int64_t soft_tileloaddt164(int16_t rows, int16_t bytes, const char *p, int64_t stride) {
  return soft_tileloadd64(rows, bytes, p, stride);
}
void soft_tilestored64(int16_t rows, int16_t bytes, char *p, int64_t stride, int64_t t) {
  for (int r = 0; r < rows; r++) memcpy(p + r * stride, ring[t].b[r], bytes);
}
int64_t soft_tdpbf16ps(int16_t rows, int16_t bytes, int16_t k_bytes, int64_t c, int64_t a, int64_t b) {
  int64_t t = fresh();
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < bytes / 4; n++) {
      float even = 0, odd = 0;
      for (int k = 0; k < k_bytes / 4; k++) {
        even = fmaf(wide(ring[a].h[m][2 * k]), wide(ring[b].h[k][2 * n]), even);
        odd = fmaf(wide(ring[a].h[m][2 * k + 1]), wide(ring[b].h[k][2 * n + 1]), odd);
      }
      ring[t].f[m][n] = ring[c].f[m][n] + (even + odd);
    }
  return t;
}
int64_t soft_tdpbsud(int16_t rows, int16_t bytes, int16_t k_bytes, int64_t c, int64_t a, int64_t b) {
  int64_t t = fresh();
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < bytes / 4; n++) {
      int32_t sum = ring[c].i[m][n];
      for (int k = 0; k < k_bytes; k++) sum += (int8_t)ring[a].b[m][k] * ring[b].b[k / 4][4 * n + k % 4];
      ring[t].i[m][n] = sum;
    }
  return t;
}
int32_t soft_dp4a(uint32_t a, uint32_t b, int32_t c) {
  for (int i = 0; i < 32; i += 8) c += (int32_t)(a >> i & 255) * (int8_t)(b >> i & 255);
  return c;
}
uint32_t soft_prmt(uint32_t low, uint32_t high, uint32_t selector) {
  uint64_t bytes = (uint64_t)high << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) {
    uint32_t nibble = selector >> 4 * i & 15, byte = bytes >> 8 * (nibble & 7) & 255;
    result |= (nibble & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
  }
  return result;
}
"""
DECLARATIONS = """
llvm.func @soft_tilezero(i16, i16) -> i64
llvm.func @soft_tileloadd64(i16, i16, !llvm.ptr, i64) -> i64
llvm.func @soft_tileloaddt164(i16, i16, !llvm.ptr, i64) -> i64
llvm.func @soft_tilestored64(i16, i16, !llvm.ptr, i64, i64)
llvm.func @soft_tdpbf16ps(i16, i16, i16, i64, i64, i64) -> i64
llvm.func @soft_tdpbsud(i16, i16, i16, i64, i64, i64) -> i64
llvm.func @soft_dp4a(i32, i32, i32) -> i32
llvm.func @soft_prmt(i32, i32, i32) -> i32
"""


def load_library(folder: Path) -> None:
    """Build the library and load its symbols into the process, where the JIT finds them; only x86 emulates."""
    if not IN_SOFTWARE:
        return
    source, library = folder / "soft_tiles.c", folder / "soft_tiles.so"
    source.write_text(SOURCE)
    command = ["cc", "-O2", "-mfma", "-ffp-contract=off", "-shared", "-fPIC", str(source), "-o", str(library), "-lm"]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _vnni_in_software(call: re.Match[str]) -> str:
    """Emit VNNI as plain vector operations."""
    result, bits, *operands = call.groups()
    return _dots(result, int(bits) // 8, "arith.extui", *operands)


def _sdot_in_software(call: re.Match[str]) -> str:
    """Emit SDOT as plain vector operations."""
    result, *operands = call.groups()
    return _dots(result, 16, "arith.extsi", *operands)


def _dots(result: str, count: int, extension: str, total: str, weights: str, values: str) -> str:
    """Emit dot products of four bytes, `count` bytes in all, whose weights are extended by `extension`."""
    own = f"%dots{result[1:]}"
    bytes_, products = f"vector<{count}xi8>", f"vector<{count}xi32>"
    lines = [
        f"{own}_w = {extension} {weights} : {bytes_} to {products}",
        f"{own}_x = arith.extsi {values} : {bytes_} to {products}",
        f"{own}_p = arith.muli {own}_w, {own}_x : {products}",
    ]
    for i in range(4):
        lanes = [*range(i, count, 4)]
        sum_ = result if i == 3 else f"{own}_s{i}"
        lines.append(f"{own}_l{i} = vector.shuffle {own}_p, {own}_p {lanes} : {products}, {products}")
        lines.append(f"{sum_} = arith.addi {total}, {own}_l{i} : vector<{count // 4}xi32>")
        total = sum_
    return "\n".join(lines)


def _pairs_in_software(call: re.Match[str]) -> str:
    """Emit `vdpbf16ps` as FMAs."""
    result, total, *operands = call.groups()
    own = f"%pairs{result[1:]}"
    lines = [
        f"{own}_mask = arith.constant dense<-65536> : vector<16xi32>",
        f"{own}_bits = arith.constant dense<16> : vector<16xi32>",
    ]
    for name, operand in zip("wx", operands, strict=True):
        lines += [
            f"{own}_{name} = vector.bitcast {operand} : vector<32xbf16> to vector<16xi32>",
            f"{own}_{name}_high = arith.andi {own}_{name}, {own}_mask : vector<16xi32>",
            f"{own}_{name}_low = arith.shli {own}_{name}, {own}_bits : vector<16xi32>",
        ]
        for half in ("high", "low"):
            value = f"{own}_{name}_{half}"
            lines.append(f"{value}_f = arith.bitcast {value} : vector<16xi32> to vector<16xf32>")
    lines += [
        f"{own}_first = math.fma {own}_w_high_f, {own}_x_high_f, {total} : vector<16xf32>",
        f"{result} = math.fma {own}_w_low_f, {own}_x_low_f, {own}_first : vector<16xf32>",
    ]
    return "\n".join(lines)


def _lookup_in_software(call: re.Match[str]) -> str:
    """Emit a lookup of 64 bytes, in a table that each 16 of them repeat, as two of 32."""
    result, *operands = call.groups()
    own, half, whole = f"%lookup{result[1:]}", "vector<32xi8>", "vector<64xi8>"
    lines = []
    for i in range(2):
        lanes = [*range(32 * i, 32 * i + 32)]
        lines += [
            f"{own}_{name}{i} = vector.shuffle {operand}, {operand} {lanes} : {whole}, {whole}"
            for name, operand in zip("tc", operands, strict=True)
        ]
        call_ = f'llvm.call_intrinsic "llvm.x86.avx2.pshuf.b"({own}_t{i}, {own}_c{i}) : ({half}, {half}) -> {half}'
        lines.append(f"{own}_{i} = {call_}")
    lines.append(f"{result} = vector.shuffle {own}_0, {own}_1 {[*range(64)]} : {half}, {half}")
    return "\n".join(lines)


def _saddlp_in_software(call: re.Match[str]) -> str:
    """Emit SADDLP, sums of neighbours in twice as many bits, as plain vector operations."""
    result, words = call.groups()
    own, wide = f"%saddlp{result[1:]}", "vector<8xi32>"
    lines = [f"{own} = arith.extsi {words} : vector<8xi16> to {wide}"]
    for i, name in enumerate(("even", "odd")):
        lines.append(f"{own}_{name} = vector.shuffle {own}, {own} {[*range(i, 8, 2)]} : {wide}, {wide}")
    lines.append(f"{result} = arith.addi {own}_even, {own}_odd : vector<4xi32>")
    return "\n".join(lines)


def software(text: str) -> str:
    """Return the kernel with tile intrinsics replaced by calls of the library, the others by vector operations."""
    operands = r"\((%[\w#]+), (%[\w#]+), (%[\w#]+)\) : .*"
    units = (
        (r"x86\.avx512\.vpdpbusd\.(256|512)", _vnni_in_software),
        (r"x86\.avx512bf16\.dpbf16ps\.512", _pairs_in_software),
        (r"aarch64\.neon\.sdot\.v4i32\.v16i8", _sdot_in_software),
    )
    for name, emit in units:
        text = re.sub(rf'(%\w+) = llvm\.call_intrinsic "llvm\.{name}"{operands}', emit, text)
    sums = r'(%\w+) = llvm\.call_intrinsic "llvm\.aarch64\.neon\.saddlp\.v4i32\.v8i16"\((%\w+)\) : .*'
    text = re.sub(sums, _saddlp_in_software, text)
    text = text.replace("llvm.aarch64.neon.tbl1.v16i8", "llvm.x86.ssse3.pshuf.b.128")
    lookup = r'(%\w+) = llvm\.call_intrinsic "llvm\.x86\.avx512\.pshuf\.b\.512"\((%\w+), (%\w+)\) : .*'
    text = re.sub(lookup, _lookup_in_software, text)
    calls = re.sub(r'llvm\.call_intrinsic "llvm\.x86\.(\w+)\.internal"', r"llvm.call @soft_\1", text)
    for name, soft in (("idp4a.u.s", "dp4a"), ("prmt", "prmt")):
        calls = calls.replace(f'llvm.call_intrinsic "llvm.nvvm.{name}"', f"llvm.call @soft_{soft}")
    return DECLARATIONS + calls.replace("!llvm.x86_amx", "i64")


class SoftJit:
    """A Jit that compiles kernels for units that the host lacks."""

    def __init__(self, cpu: str, features: str, vector_bits: int, cache_dir: str = "") -> None:
        avx2 = INSTRUCTION_SETS["avx2"]
        self._jit = _native.Jit(avx2.cpu, avx2.features, avx2.vector_bits, cache_dir)

    @property
    def cache(self) -> _native.ObjectCache:
        return self._jit.cache

    def compile(self, source: str, symbols: list[str]) -> list[int]:
        return self._jit.compile(software(source), symbols)


def use(monkeypatch: pytest.MonkeyPatch, folder: Path, isa: str) -> None:
    """Have the runner choose `isa`, and run its kernels in software; the library is built in `folder`."""
    load_library(folder)
    monkeypatch.setattr(cpu, "Jit", SoftJit)
    monkeypatch.setattr(instruction_sets, "choose_isa", lambda _=None: INSTRUCTION_SETS[isa])
