#pragma once

#include <cstdint>

#include "weights/packing.h"

namespace quire {

/// A change of low rank, B A: `a` f32 [rank, k] and `b` f32 [n, rank] by rows.
struct LowRankChange {
  const float* a;
  const float* b;
  std::int64_t rank;
};

/// Writes the norms of the rows of W + B A to `norms` [n]: what DoRA divides by. On this thread alone.
///
/// An element of B A is a chain of FMAs in f32 in the order of the ranks, from zero, to which that of W is added. The
/// squares are summed in f64, columns modulo 16 apart, then halves of these sums. Denormals count as zero. So a row has
/// the same bits on every host, whatever rows are with it.
void changed_norms(const MatrixView& weights, const LowRankChange& change, float* norms);

}  // namespace quire
