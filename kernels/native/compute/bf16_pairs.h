#pragma once

#include <cstdint>

namespace quire {

/// Adds to each of 16 lanes of `acc` the products of the pairs of bf16 in `a` and `b`, as `vdpbf16ps` does.
using PairProducts = void (*)(float* acc, const std::uint32_t* a, const std::uint32_t* b);

/// Returns this host's `vdpbf16ps`, or null if it has none.
PairProducts host_pair_products();

/// Returns true if `products` has the bits of two FMAs, first of the upper halves and then of the lower, with denormals
/// as zero, on some 10,000 lanes that tell other orders and roundings apart. NaNs count as equal. It takes 1 ms.
bool adds_by_fma(PairProducts products);

/// Returns the time that a `vdpbf16ps`, of twice as many multiply-adds, takes relative to an FMA; 0 without one. It is
/// 1 or less on AMD's CPUs, but 4 on Intel's Sapphire Rapids. It takes 0.1 ms.
double pair_products_cost();

}  // namespace quire
