"""Translation of PTX to C, so that the code of GPU kernels runs on a CPU: `ptx_to_c.py SOURCE.ptx TARGET.so`.

Each instruction becomes a C statement that has its meaning bit for bit, with denormals as zero: the caller sets FTZ and
DAZ. An instruction that is not known is an error. Of each entry function `name` the library has `name_info` (block.h).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

PRELUDE = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "block.h"
typedef uint16_t __attribute__((may_alias, aligned(1))) M16;
typedef uint32_t __attribute__((may_alias, aligned(1))) M32;
typedef uint64_t __attribute__((may_alias, aligned(1))) M64;
typedef uint8_t __attribute__((may_alias)) M8;
static inline float F(uint32_t b) { float f; memcpy(&f, &b, 4); return f; }
static inline uint32_t B(float f) { uint32_t b; memcpy(&b, &f, 4); return b; }
static inline uint32_t to_s32(float f) {  /* saturates, and a NaN is 0 */
  if (f != f) return 0;
  if (f >= 2147483648.0f) return 0x7fffffffu;
  return f < -2147483648.0f ? 0x80000000u : (uint32_t)(int32_t)f;
}
static inline double D(uint64_t b) { double f; memcpy(&f, &b, 8); return f; }
static inline uint64_t B64(double f) { uint64_t b; memcpy(&b, &f, 8); return b; }
static inline uint64_t to_s64(float f) {
  if (f != f) return 0x8000000000000000u;
  if (f >= 0x1p63f) return 0x7fffffffffffffffu;
  return f < -0x1p63f ? 0x8000000000000000u : (uint64_t)(int64_t)f;
}
static inline uint64_t to_u64(double f) {
  if (f != f) return 0x8000000000000000u;
  return f >= 0x1p64 ? ~0ull : f <= 0 ? 0 : (uint64_t)f;
}
static inline uint32_t flushed(uint32_t b) { return b & 0x7f800000u ? b : b & 0x80000000u; }
static inline uint32_t extreme(uint32_t a, uint32_t b, int largest) {  /* of a NaN and a number the number */
  a = flushed(a), b = flushed(b);
  if (F(a) != F(a)) return F(b) != F(b) ? 0x7fffffffu : b;
  if (F(b) != F(b)) return a;
  if (F(a) == F(b)) return largest ? a & b : a | b;  /* which differ in the sign of zero */
  return (F(a) > F(b)) == largest ? a : b;
}
static inline uint16_t to_bf16(uint32_t b) {
  if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (b + 0x7fffu + (b >> 16 & 1)) >> 16;
}
static inline float half(uint16_t b) { _Float16 h; memcpy(&h, &b, 2); return h; }
static inline uint64_t bfe(uint64_t a, uint32_t at, uint32_t count) {
  at &= 255, count &= 255;
  return at > 63 || !count ? 0 : count > 63 ? a >> at : a >> at & ((1ull << count) - 1);
}
static inline uint32_t signed_bfe(uint32_t a, uint32_t at, uint32_t count) {
  at &= 255, count &= 255;
  int64_t moved = (int64_t)(int32_t)a >> (at > 31 ? 31 : at);
  return !count ? 0 : count > 31 ? moved : (int64_t)((uint64_t)moved << (64 - count)) >> (64 - count);
}
static inline uint32_t prmt(uint32_t low, uint32_t high, uint32_t selector) {
  uint64_t bytes = (uint64_t)high << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) {
    uint32_t nibble = selector >> 4 * i & 15, byte = bytes >> 8 * (nibble & 7) & 255;
    result |= (nibble & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
  }
  return result;
}
static inline uint32_t dp4a(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 32; i += 8) c += (uint32_t)((int32_t)(a >> i & 255) * (int8_t)(b >> i & 255));
  return c;
}
static void misaligned(Block *mates, uint32_t site) {
  if (mates) mates->fail(mates, site, "an address is not aligned");
  __builtin_trap();
}
static uint32_t shuffle(Block *mates, uint32_t thread, uint32_t site, char kind, uint32_t a, uint32_t b, uint32_t c,
                        uint32_t mask) {
  const Words *words = mates->meet(mates, thread, site, mask, &a, 1);
  uint32_t lane = thread % WARP, segment = c >> 8 & 31, least = lane & segment, most = least | (c & 31 & ~segment);
  uint32_t from = kind == 'i' ? least | (b & 31 & ~segment) : lane ^ (b & 31);
  if (from > most) from = lane;
  if (!(mask >> from & 1)) mates->fail(mates, site, "a shuffle reads a thread that it does not name");
  return words[from][0];
}
typedef struct {  /* that a thread has not waited for, each with the number of its group */
  uint64_t target[64], source[64];
  uint32_t group[64], count, groups;
} Copies;
static void begin_copy(Block *mates, uint32_t site, Copies *copies, uint64_t target, uint64_t source) {
  if (copies->count == 64) mates->fail(mates, site, "a thread has begun too many copies");
  memset((void *)target, 0xab, 16);  /* nobody may read what is there from now on */
  uint32_t i = copies->count++;
  copies->target[i] = target, copies->source[i] = source, copies->group[i] = copies->groups;
}
static void end_copies(Copies *copies, int32_t before) {  /* those of groups before that number */
  uint32_t kept = 0;
  for (uint32_t i = 0; i < copies->count; i++)
    if ((int32_t)copies->group[i] < before) {
      memcpy((void *)copies->target[i], (void *)copies->source[i], 16);
    } else {
      copies->target[kept] = copies->target[i], copies->source[kept] = copies->source[i];
      copies->group[kept++] = copies->group[i];
    }
  copies->count = kept;
}
static void multiply_tiles(Block *mates, uint32_t thread, uint32_t site, const uint32_t *own, uint32_t *sums) {
  const Words *words = mates->meet(mates, thread, site, ~0u, own, 6);
  uint32_t lane = thread % WARP;
  for (int i = 0; i < 4; i++) {  /* the first two of a row, those of the row 8 below */
    uint32_t row = lane / 4, column = lane % 4 * 2 + i % 2, sum = own[6 + i];
    for (uint32_t k = 0; k < 8; k++)  /* fours of k */
      sum = dp4a(words[column * 4 + k % 4][4 + k / 4], words[row * 4 + k % 4][i / 2 + k / 4 * 2], sum);
    sums[i] = sum;
  }
}
static float truncated(double value) {
  float rounded = (float)value;
  return fabs((double)rounded) > fabs(value) ? nextafterf(rounded, 0.0f) : rounded;
}
/* Of bf16. NVIDIA does not say in which order tensor cores add. Here products are added to the sum one k after the
   other, and each sum is rounded towards zero, so that results differ from those of FMAs and of any other order. */
static void multiply_float_tiles(Block *mates, uint32_t thread, uint32_t site, const uint32_t *own, uint32_t *sums) {
  const Words *words = mates->meet(mates, thread, site, ~0u, own, 6);
  uint32_t lane = thread % WARP;
  for (int i = 0; i < 4; i++) {
    uint32_t row = lane / 4, column = lane % 4 * 2 + i % 2;
    float sum = F(own[6 + i]);
    for (uint32_t k = 0; k < 8; k++) {  /* pairs of k */
      uint32_t a = words[row * 4 + k % 4][i / 2 + k / 4 * 2], b = words[column * 4 + k % 4][4 + k / 4];
      sum = truncated((double)F(a << 16) * F(b << 16) + sum);
      sum = truncated((double)F(a & 0xffff0000u) * F(b & 0xffff0000u) + sum);
    }
    sums[i] = B(sum);
  }
}
"""

SIGNED = {"s8": "int8_t", "s16": "int16_t", "s32": "int32_t", "s64": "int64_t"}
UNSIGNED = {f"{kind}{bits}": f"uint{bits}_t" for kind in "ub" for bits in (8, 16, 32, 64)}
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
LOGIC = {"and": "&", "or": "|", "xor": "^"}
ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/", "rem": "%"}


class Translator:
    """Translates the entry functions of one module."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.statements = 0
        self.meets = False
        self.special = {"%tid.x": "thread", "%ntid.x": "threads", "%ctaid.x": "block"}

    def module(self, text: str) -> str:
        """Return C for a module."""
        text = re.sub(r"//[^\n]*", "", text)
        constants = re.findall(r"\.global[^;{]*\.b8 (\w+)\[\d+\] = \{([^}]*)\};", text)
        found = re.findall(r"\.visible \.entry (\w+)\((.*?)\)([^{]*)\{(.*?)\n\}", text, re.DOTALL)
        if not found:
            raise ValueError("no entry function")
        shared, size, has_more = self.shared_memory(text)
        functions = [self.function(parts, size, has_more) for parts in found]
        return "\n".join([PRELUDE, *shared, *(self.table(*each) for each in constants), *functions])

    @staticmethod
    def shared_memory(text: str) -> tuple[list[str], int, bool]:
        """Return declarations of a block's shared memory, its bytes, and whether launches give it more after these."""
        names, size = [], 0
        for alignment, name, count in re.findall(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\]", text):
            size = -(-size // int(alignment)) * int(alignment)
            names.append(f"#define {name} (shared + {size})")
            size += int(count)
        if size > 48 << 10:
            raise ValueError(f"{size} bytes of shared memory; a block has 49152")
        more = re.findall(r"\.extern \.shared \.align \d+ \.b8 (\w+)\[\]", text)
        if more and size:
            raise ValueError("more shared memory beside some whose size is known")
        names += [f"#define {name} shared" for name in more]
        memory = f"static uint8_t shared[{'MOST_SHARED' if more else size or 1}] __attribute__((aligned(1024)));"
        return [memory, *names], size, bool(more)

    def function(self, parts: Sequence[str], shared_bytes: int, has_more: bool) -> str:
        """Return C for an entry function, of which `parts` are the name, parameters, limits and body."""
        name, parameters, limits, body = parts
        names = re.findall(r"\.param[^,]* (\w+)", parameters)
        self.lines, self.meets = [], False
        for statement in re.findall(r"[^;:]+?[;:]", body):
            self.statements += 1
            self.statement(" ".join(statement.split()))
        most = re.search(r"\.(?:maxntid|reqntid) (\d+)", limits)
        arguments = "const uint64_t *parameters, uint32_t thread, uint32_t threads, uint32_t block, Block *mates"
        head = f"static void {name}({arguments}) {{"
        loads = [f"const uint64_t {each} = parameters[{i}];" for i, each in enumerate(names)]
        loads.append("Copies copies = {.count = 0, .groups = 0};")
        fields = f"{name}, shared, {shared_bytes}, {most[1] if most else 0}, {int(has_more)}, {int(self.meets)}"
        return "\n".join([head, *loads, *self.lines, "}", f"Function {name}_info = {{{fields}}};"])

    @staticmethod
    def table(name: str, values: str) -> str:
        """Return the declaration of constants."""
        return f"static const uint8_t {name}[] __attribute__((aligned(64))) = {{{values}}};"

    def statement(self, text: str) -> None:
        """Add a declaration, a label or an instruction, and the braces before it of a scope that begins or ends."""
        while text.startswith(("{", "}")):
            self.lines.append(text[0])
            text = text[1:].lstrip()
        if text.endswith(":"):
            self.lines.append(f"{text[:-1].replace('$', 'L')}:;")
        elif text.startswith(".reg"):
            self.registers(*re.findall(r"\.reg \.(\w+) (%?\w+)(?:<(\d+)>)?", text)[0])
        elif text.startswith(".local"):
            name, size = re.findall(r"(\w+)\[(\d+)\]", text)[0]
            self.lines.append(f"uint8_t {name}[{size}] __attribute__((aligned(64)));")
        elif text.startswith(".shared"):
            pass  # shared_memory() has it
        elif not text.startswith((".loc", ".pragma")):
            guard, text = re.findall(r"(?:@(!?%\w+) )?(.*);", text)[0]
            opcode, _, rest = text.partition(" ")
            code = self.instruction(opcode.split("."), self.operands(rest))
            condition = guard.replace("%", "v_")
            self.lines.append(f"if ({condition}) {{ {code} }}" if guard else code)

    def registers(self, type_: str, name: str, count: str) -> None:
        """Declare registers."""
        c_type = "uint8_t" if type_ == "pred" else f"uint{type_[1:]}_t"
        variable = f"v_{name.removeprefix('%')}"
        if not name.startswith("%"):
            self.special[name] = variable
        variables = [f"{variable}{i}" for i in range(int(count))] if count else [variable]
        self.lines.append(f"{c_type} {', '.join(variables)};")

    def operands(self, text: str) -> list[str]:
        """Return the operands; vectors and addresses are whole."""
        return [found.strip() for found in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", text)]

    def value(self, operand: str) -> str:
        """Return an operand as C: its bits."""
        if operand in self.special:
            return self.special[operand]
        if operand.startswith("%"):
            return operand.replace("%", "v_")
        if operand.startswith("0f"):
            return f"0x{operand[2:]}u"
        if operand.startswith("0d"):
            return f"0x{operand[2:]}ull"
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", operand):
            return f"({operand}ll)" if not operand.startswith("0x") else f"({operand}ull)"
        return f"(uint64_t){operand}"  # the address of a table or of local memory

    def instruction(self, opcode: list[str], operands: list[str]) -> str:
        """Return an instruction as C. Raises ValueError for one that is not known."""
        name, type_ = opcode[0], opcode[-1]
        known: Callable[[list[str], list[str]], str] | None = getattr(self, f"do_{name}", None)
        if known is not None:
            return known(opcode, operands)
        if name in LOGIC:
            target, a, b = map(self.value, operands)
            return f"{target} = {a} {LOGIC[name]} {b};"
        if name in ARITHMETIC:
            return self.arithmetic(opcode, operands)
        raise ValueError(f"unknown instruction {'.'.join(opcode)} ({type_})")

    def arithmetic(self, opcode: list[str], operands: list[str]) -> str:
        """Translate additions, multiplications and so on."""
        (name, *how), type_ = opcode, opcode[-1]
        target, a, b = map(self.value, operands)
        if type_ == "f64":
            if how != ["rn", "f64"]:
                raise ValueError(f"{'.'.join(opcode)} does not say how it rounds")
            return f"{target} = B64(D({a}) {ARITHMETIC[name]} D({b}));"
        if type_ == "f32":
            self.check_rounding(opcode)
            return f"{target} = B(F({a}) {ARITHMETIC[name]} F({b}));"
        if type_ == "f32x2":
            self.check_rounding(opcode)
            return f"{target} = {self.both(lambda lane: f'B(F({lane(a)}) {ARITHMETIC[name]} F({lane(b)}))')};"
        if name == "mul" and how[0] == "hi":
            if type_ not in ("u16", "u32", "u64"):
                raise ValueError(f"unknown instruction {'.'.join(opcode)}")
            bits = type_[1:]
            return f"{target} = (unsigned __int128)(uint{bits}_t){a} * (uint{bits}_t){b} >> {bits};"
        c_type = (SIGNED | UNSIGNED)[type_]
        if name == "mul" and how[0] == "wide":
            wide = {"s32": "int64_t", "u32": "uint64_t", "u16": "uint32_t", "s16": "int32_t"}[type_]
            return f"{target} = ({wide})({c_type}){a} * ({c_type}){b};"
        if name in ("div", "rem"):
            return f"{target} = ({c_type}){a} {ARITHMETIC[name]} ({c_type}){b};"
        wrapped = c_type if c_type.startswith("u") else f"u{c_type}"  # sums wrap around
        return f"{target} = ({wrapped}){a} {ARITHMETIC[name]} ({wrapped}){b};"

    @staticmethod
    def check_rounding(opcode: list[str]) -> None:
        """Raise ValueError for an operation that an assembler may round or join in another way."""
        if opcode[1:] not in (["rn", "ftz", "f32"], ["rn", "ftz", "f32x2"]):
            raise ValueError(f"{'.'.join(opcode)} does not say how it rounds")

    @staticmethod
    def both(result: Callable[[Callable[[str], str]], str]) -> str:
        """Return the bits of two results, of which each is given what returns its lane of an operand."""
        low, high = result("(uint32_t){}".format), result("(uint32_t)({} >> 32)".format)
        return f"(uint64_t){high} << 32 | {low}"

    def do_fma(self, opcode: list[str], operands: list[str]) -> str:
        self.check_rounding(opcode)
        target, a, b, c = map(self.value, operands)
        if opcode[-1] == "f32x2":
            result = self.both(lambda lane: f"B(__builtin_fmaf(F({lane(a)}), F({lane(b)}), F({lane(c)})))")
            return f"{target} = {result};"
        return f"{target} = B(__builtin_fmaf(F({a}), F({b}), F({c})));"

    def do_mad(self, opcode: list[str], operands: list[str]) -> str:
        target, a, b, c = map(self.value, operands)
        if opcode[1] == "wide":
            narrow = (SIGNED | UNSIGNED)[opcode[2]]
            return f"{target} = (uint64_t)((int64_t)({narrow}){a} * ({narrow}){b}) + {c};"
        bits = opcode[2][1:]
        return f"{target} = (uint{bits}_t){a} * (uint{bits}_t){b} + {c};"

    def do_sqrt(self, opcode: list[str], operands: list[str]) -> str:
        self.check_rounding(opcode)
        target, a = map(self.value, operands)
        return f"{target} = B(__builtin_sqrtf(F({a})));"

    def do_rcp(self, opcode: list[str], operands: list[str]) -> str:
        self.check_rounding(opcode)
        target, a = map(self.value, operands)
        return f"{target} = B(1.0f / F({a}));"

    def do_neg(self, opcode: list[str], operands: list[str]) -> str:
        target, a = map(self.value, operands)
        if opcode[-1] != "f32":
            return f"{target} = 0 - {a};"
        kept = f"flushed({a})" if "ftz" in opcode else a
        return f"{target} = {kept} ^ 0x80000000u;"

    def do_abs(self, opcode: list[str], operands: list[str]) -> str:
        target, a = map(self.value, operands)
        if opcode[-1] == "f32":
            return f"{target} = {a} & 0x7fffffffu;"
        return f"{target} = ({SIGNED[opcode[-1]]}){a} < 0 ? 0 - {a} : {a};"

    def do_copysign(self, opcode: list[str], operands: list[str]) -> str:
        target, a, b = map(self.value, operands)
        return f"{target} = ({a} & 0x80000000u) | ({b} & 0x7fffffffu);"

    def do_min(self, opcode: list[str], operands: list[str]) -> str:
        return self.extreme("<", opcode, operands)

    def do_max(self, opcode: list[str], operands: list[str]) -> str:
        return self.extreme(">", opcode, operands)

    def extreme(self, comparison: str, opcode: list[str], operands: list[str]) -> str:
        type_, (target, a, b) = opcode[-1], map(self.value, operands)
        if opcode[1:] == ["ftz", "f32"]:
            return f"{target} = extreme({a}, {b}, {int(comparison == '>')});"
        if type_ not in SIGNED | UNSIGNED:
            raise ValueError(f"a minimum or maximum of {type_} is not known")
        c_type = (SIGNED | UNSIGNED)[type_]
        return f"{target} = ({c_type}){a} {comparison} ({c_type}){b} ? {a} : {b};"

    def do_not(self, opcode: list[str], operands: list[str]) -> str:
        target, a = map(self.value, operands)
        return f"{target} = {'!' if opcode[-1] == 'pred' else '~'}{a};"

    def do_shl(self, opcode: list[str], operands: list[str]) -> str:
        target, a, b = map(self.value, operands)
        bits = opcode[-1][1:]
        return f"{target} = {b} >= {bits} ? 0 : (uint{bits}_t){a} << {b};"

    def do_shr(self, opcode: list[str], operands: list[str]) -> str:
        target, a, b = map(self.value, operands)
        bits, c_type = opcode[-1][1:], (SIGNED | UNSIGNED)[opcode[-1]]
        beyond = f"({c_type}){a} >> {int(bits) - 1}" if opcode[-1] in SIGNED else "0"
        return f"{target} = {b} >= {bits} ? {beyond} : ({c_type}){a} >> {b};"

    def do_bfe(self, opcode: list[str], operands: list[str]) -> str:
        target, a, b, c = map(self.value, operands)
        if opcode[-1] == "s64":
            raise ValueError(f"unknown instruction {'.'.join(opcode)}")
        return f"{target} = {'signed_bfe' if opcode[-1] == 's32' else 'bfe'}({a}, {b}, {c});"

    def do_prmt(self, opcode: list[str], operands: list[str]) -> str:
        target, a, b, c = map(self.value, operands)
        return f"{target} = prmt({a}, {b}, {c});"

    def do_dp4a(self, opcode: list[str], operands: list[str]) -> str:
        if opcode[1:] != ["u32", "s32"]:
            raise ValueError(f"unknown instruction {'.'.join(opcode)}")
        target, a, b, c = map(self.value, operands)
        return f"{target} = dp4a({a}, {b}, {c});"

    def do_shfl(self, opcode: list[str], operands: list[str]) -> str:
        if opcode[1] != "sync" or opcode[2] not in ("idx", "bfly"):
            raise ValueError(f"unknown instruction {'.'.join(opcode)}")
        self.meets = True
        target, a, b, c, mask = map(self.value, operands)
        return f"{target} = shuffle(mates, thread, {self.statements}, '{opcode[2][0]}', {a}, {b}, {c}, {mask});"

    def do_mma(self, opcode: list[str], operands: list[str]) -> str:
        multiply = {
            "sync.aligned.m16n8k32.row.col.s32.s8.u8.s32": "multiply_tiles",
            "sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": "multiply_float_tiles",
        }.get(".".join(opcode[1:]))
        if multiply is None:
            raise ValueError(f"unknown instruction {'.'.join(opcode)}")
        self.meets = True
        targets, *sources = ([self.value(each) for each in self.operands(part[1:-1])] for part in operands)
        values = ", ".join(value for part in sources for value in part)
        results = " ".join(f"{target} = sums[{i}];" for i, target in enumerate(targets))
        call = f"{multiply}(mates, thread, {self.statements}, (uint32_t[]){{{values}}}, sums);"
        return f"{{ uint32_t sums[4]; {call} {results} }}"

    def do_cp(self, opcode: list[str], operands: list[str]) -> str:
        """Copies end as late as they may."""
        if opcode[1:] == ["async", "wait_all"]:
            return "end_copies(&copies, copies.groups + 1);"
        if opcode[1:] == ["async", "commit_group"]:
            return "copies.groups++;"
        if opcode[1:] == ["async", "wait_group"]:
            return f"end_copies(&copies, copies.groups - {self.value(operands[0])});"
        if opcode[1:] != ["async", "cg", "shared", "global"] or operands[2:] != ["16"]:
            raise ValueError(f"unknown instruction {'.'.join(opcode)}")
        target, source = map(self.address, operands[:2])
        check = f"if ({target} % 16 || {source} % 16) misaligned(mates, {self.statements});"
        return f"{check} begin_copy(mates, {self.statements}, &copies, {target}, {source});"

    def do_bar(self, opcode: list[str], operands: list[str]) -> str:
        self.meets = True
        if opcode[1:] == ["warp", "sync"]:
            return f"mates->meet(mates, thread, {self.statements}, {self.value(operands[0])}, 0, 0);"
        if opcode[1:] != ["sync"] or operands != ["0"]:
            raise ValueError(f"unknown instruction {'.'.join(opcode)}")
        return f"mates->barrier(mates, thread, {self.statements});"

    def do_setp(self, opcode: list[str], operands: list[str]) -> str:
        comparison, type_ = opcode[1], opcode[-1]
        target, a, b = map(self.value, operands)
        if type_ in ("f32", "f64"):
            unordered = comparison.endswith("u")
            plain = comparison.removesuffix("u") if unordered else comparison
            of = "F" if type_ == "f32" else "D"
            if comparison == "num":
                return f"{target} = {of}({a}) == {of}({a}) && {of}({b}) == {of}({b});"
            compared = f"{of}({a}) {COMPARISONS[plain]} {of}({b})"
            either = f"{of}({a}) != {of}({a}) || {of}({b}) != {of}({b})"
            return f"{target} = {compared}{f' || {either}' if unordered else ''};"
        c_type = (SIGNED | UNSIGNED)[type_]
        return f"{target} = ({c_type}){a} {COMPARISONS[comparison]} ({c_type}){b};"

    def do_selp(self, opcode: list[str], operands: list[str]) -> str:
        target, a, b, condition = map(self.value, operands)
        return f"{target} = {condition} ? {a} : {b};"

    def do_cvt(self, opcode: list[str], operands: list[str]) -> str:
        *how, to, source = opcode[1:]
        target, a = map(self.value, operands)
        if (to, source) == ("f32", "f32") and how == ["rni", "ftz"]:
            return f"{target} = B(rintf(F({a})));"
        if (to, source) == ("s32", "f32") and how == ["rzi", "ftz"]:
            return f"{target} = to_s32(F({a}));"
        if (to, source) == ("s64", "f32") and how == ["rzi", "ftz"]:
            return f"{target} = to_s64(F({a}));"
        if (to, source) == ("f64", "u64") and how == ["rn"]:
            return f"{target} = B64((double)(uint64_t){a});"
        if (to, source) == ("f64", "f32") and how == ["ftz"]:
            return f"{target} = B64((double)F({a}));"
        if (to, source) == ("f64", "f64") and how == ["rpi"]:
            return f"{target} = B64(ceil(D({a})));"
        if (to, source) == ("u64", "f64") and how == ["rzi"]:
            return f"{target} = to_u64(D({a}));"
        if (to, source) == ("bf16", "f32") and how == ["rn"]:
            return f"{target} = to_bf16({a});"
        if (to, source) == ("f32", "f16") and how == ["ftz"]:  # a denormal f16 is a normal f32
            return f"{target} = B(half({a}));"
        integers = SIGNED | UNSIGNED
        if to == "f32" and how == ["rn"] and source in integers:
            return f"{target} = B((float)({integers[source]}){a});"
        if to in integers and source in integers and not how:
            return f"{target} = ({integers[to]})({integers[source]}){a};"
        raise ValueError(f"unknown instruction {'.'.join(opcode)}")

    def do_cvta(self, opcode: list[str], operands: list[str]) -> str:
        return f"{self.value(operands[0])} = {self.value(operands[1])};"

    def do_mov(self, opcode: list[str], operands: list[str]) -> str:
        target, source = operands
        if source.startswith("{"):  # the first is the lowest
            parts = [self.value(part) for part in self.operands(source[1:-1])]
            bits, whole = int(opcode[-1][1:]) // len(parts), f"uint{opcode[-1][1:]}_t"
            joined = " | ".join(f"({whole})(uint{bits}_t){part} << {bits * i}" for i, part in enumerate(parts))
            return f"{self.value(target)} = {joined};"
        if target.startswith("{"):
            parts = self.operands(target[1:-1])
            bits = int(opcode[-1][1:]) // len(parts)
            wanted = [(i, self.value(part)) for i, part in enumerate(parts) if part != "_"]
            return " ".join(f"{part} = {self.value(source)} >> {bits * i};" for i, part in wanted)
        return f"{self.value(target)} = {self.value(source)};"

    def address(self, operand: str) -> str:
        """Return an address as C."""
        base, offset = re.findall(r"\[([%$\w]+)\s*\+?\s*(-?\d+)?\]", operand)[0]
        return f"({self.value(base)} + ({offset or 0}))"

    def do_ld(self, opcode: list[str], operands: list[str]) -> str:
        target, at = operands
        if "param" in opcode:
            return f"{self.value(target)} = {at[1:-1]};"
        bits, extended = opcode[-1][1:], "(int{0}_t)" if opcode[-1].startswith("s") else ""
        targets = self.operands(target[1:-1]) if target.startswith("{") else [target]
        loads = [
            f"{self.value(each)} = {extended.format(bits)}*(M{bits} *)(at + {int(bits) // 8 * i});"
            for i, each in enumerate(targets)
        ]
        return f"{{ uint64_t at = {self.address(at)}; {self.aligned(bits, targets)} {' '.join(loads)} }}"

    def do_st(self, opcode: list[str], operands: list[str]) -> str:
        at, source = operands
        bits = opcode[-1][1:]
        sources = self.operands(source[1:-1]) if source.startswith("{") else [source]
        stores = [f"*(M{bits} *)(at + {int(bits) // 8 * i}) = {self.value(each)};" for i, each in enumerate(sources)]
        return f"{{ uint64_t at = {self.address(at)}; {self.aligned(bits, sources)} {' '.join(stores)} }}"

    def aligned(self, bits: str, values: list[str]) -> str:
        """Return a check of the address `at`: a GPU can't access one that the size does not divide."""
        return f"if (at % {int(bits) // 8 * len(values)}) misaligned(mates, {self.statements});"

    def do_bra(self, opcode: list[str], operands: list[str]) -> str:
        return f"goto {operands[0].replace('$', 'L')};"

    def do_ret(self, opcode: list[str], operands: list[str]) -> str:
        return "return;"


def main() -> None:
    """Translate a file, and compile it."""
    source, target = map(Path, sys.argv[1:])
    code = Translator().module(source.read_text())
    command = [
        "cc",
        "-O1",
        "-mfma",
        "-mf16c",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-w",
        "-shared",
        "-fPIC",
        f"-I{Path(__file__).parent}",
        "-x",
        "c",
        "-",
    ]
    subprocess.run([*command, "-o", str(target), "-lm"], input=code, text=True, check=True)


if __name__ == "__main__":
    main()
