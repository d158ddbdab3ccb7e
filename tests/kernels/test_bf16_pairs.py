"""`vdpbf16ps` is used only where it adds in the order of the numeric contract, and by default only where it is fast."""

from __future__ import annotations

import ctypes
import logging
import subprocess
from collections.abc import Iterator

import pytest

from quire.kernels._native import adds_pairs_by_fma, host_features, pair_products_cost
from quire.kernels.devices import instruction_sets
from quire.kernels.errors import ModelError

VARIANTS = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <xmmintrin.h>
static float wide(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
#define HIGH(x) wide(x & 0xffff0000)
#define LOW(x) wide(x << 16)
#define VARIANT(name, expression)                                           \
  void name(float *acc, const uint32_t *a, const uint32_t *b) {             \
    for (int i = 0; i < 16; i++) {                                          \
      volatile float c = acc[i], first, second, p, q;                       \
      const float x = HIGH(a[i]), y = HIGH(b[i]), v = LOW(a[i]), w = LOW(b[i]); \
      expression;                                                           \
      acc[i] = second;                                                      \
    }                                                                       \
  }
VARIANT(exact, (first = fmaf(x, y, c), second = fmaf(v, w, first)))
VARIANT(lower_first, (first = fmaf(v, w, c), second = fmaf(x, y, first)))
VARIANT(rounded_products, (p = x * y, q = v * w, first = c + p, second = first + q))
VARIANT(products_first, (p = x * y, first = fmaf(v, w, p), second = c + first))
VARIANT(no_rounding_between, (second = (float)((double)x * y + (double)v * w + c)))
VARIANT(no_infinity, (first = fmaf(x, y, c), second = fmaf(v, w, first), second = isinf(second) ? 0 : second))
VARIANT(no_sign_of_zero, (first = fmaf(x, y, c), second = fmaf(v, w, first) + 0.0f))
static void with_csr(unsigned csr, float *acc, const uint32_t *a, const uint32_t *b) {
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(csr);
  exact(acc, a, b);
  _mm_setcsr(saved);
}
void denormals(float *acc, const uint32_t *a, const uint32_t *b) { with_csr(0x1f80, acc, a, b); }
void denormal_inputs(float *acc, const uint32_t *a, const uint32_t *b) { with_csr(0x9f80, acc, a, b); }
void denormal_results(float *acc, const uint32_t *a, const uint32_t *b) { with_csr(0x1fc0, acc, a, b); }
void towards_zero(float *acc, const uint32_t *a, const uint32_t *b) { with_csr(0xffc0, acc, a, b); }
"""
WRONG = [
    "lower_first", "rounded_products", "products_first", "no_rounding_between", "no_infinity", "no_sign_of_zero",
    "denormals", "denormal_inputs", "denormal_results", "towards_zero",
]  # fmt: skip


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = tmp_path_factory.mktemp("pairs") / "variants.c"
    source.write_text(VARIANTS)
    library = source.with_suffix(".so")
    command = ["cc", "-O1", "-mfma", "-ffp-contract=off", "-shared", "-fPIC", str(source), "-o", str(library), "-lm"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def is_accepted(variants: ctypes.CDLL, name: str) -> bool:
    address = ctypes.cast(getattr(variants, name), ctypes.c_void_p).value
    assert address is not None
    return adds_pairs_by_fma(address)


def test_the_check_accepts_fmas(variants: ctypes.CDLL) -> None:
    assert is_accepted(variants, "exact")


@pytest.mark.parametrize("name", WRONG)
def test_the_check_finds_other_orders_and_roundings(variants: ctypes.CDLL, name: str) -> None:
    assert not is_accepted(variants, name)


@pytest.mark.skipif("avx512bf16" in host_features(), reason="this host has AVX512-BF16")
def test_a_host_without_the_unit_has_no_exact_one() -> None:
    assert not adds_pairs_by_fma()
    assert pair_products_cost() == 0


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A host whose best instruction set is avx512-bf16."""
    needs = instruction_sets.INSTRUCTION_SETS["avx512-bf16"].needs
    monkeypatch.setattr(instruction_sets, "host_features", lambda: sorted(needs))
    monkeypatch.setattr(instruction_sets, "adds_pairs_by_fma", lambda: True)
    monkeypatch.setattr(instruction_sets, "pair_products_cost", lambda: 1.0)
    monkeypatch.delenv("QUIRE_ISA", raising=False)
    cached = (instruction_sets.pairs_are_exact, instruction_sets.pairs_are_fast)
    for function in cached:
        function.cache_clear()
    yield monkeypatch
    for function in cached:
        function.cache_clear()


def test_pairs_are_chosen_where_they_are_fast(pairs: pytest.MonkeyPatch) -> None:
    assert instruction_sets.choose_isa().name == "avx512-bf16"


def test_slow_pairs_are_used_on_request_only(pairs: pytest.MonkeyPatch) -> None:
    pairs.setattr(instruction_sets, "pair_products_cost", lambda: 4.0)
    assert instruction_sets.choose_isa().name == "avx512-vnni"
    assert instruction_sets.choose_isa("avx512-bf16").name == "avx512-bf16"
    pairs.setenv("QUIRE_ISA", "avx512-bf16")
    assert instruction_sets.choose_isa().name == "avx512-bf16"


def test_pairs_of_other_bits_are_logged_once_and_not_used(
    pairs: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pairs.setattr(instruction_sets, "adds_pairs_by_fma", lambda: False)
    with caplog.at_level(logging.WARNING):
        assert instruction_sets.choose_isa().name == "avx512-vnni"
        assert instruction_sets.available_isas() == ["avx512-vnni", "avx512", "avx2"]
    assert [record.message for record in caplog.records] == [
        "this CPU's vdpbf16ps rounds in another way than FMAs; computing without it (avx512-bf16)"
    ]
    with pytest.raises(ModelError, match="instruction set 'avx512-bf16' is not available here"):
        instruction_sets.choose_isa("avx512-bf16")
