#pragma once

#include <cstdint>
#include <string>

#include "compute/thread_pool.h"

namespace quire {

enum class Format { bf16, f16, f32 };

/// `bf16`, `f16` or `f32`; throws std::invalid_argument for any other name.
Format format_of(const std::string& name);

/// A matrix w[n, k] where a checkpoint keeps it; strides in elements.
struct MatrixView {
  const void* data;
  Format format;
  std::int64_t n, k;
  std::int64_t n_stride, k_stride;
};

/// Writes w[n, 0 .. k) as f32.
void read_column(const MatrixView& source, std::int64_t n, float* column);

/// Where a packed matrix lies (its layout: emit/layout.py): bf16 or f32, `k_blocks` blocks of 32 along k.
struct PackedMatrix {
  void* data;
  Format format;
  std::int64_t k_blocks;
};

/// Packs `source` into the tiles of 16 columns `first_tile`, `first_tile + tile_step`, ... of `target`, rounding to
/// nearest even where the format is narrower. What no source element reaches stays as it is (zero in a fresh matrix).
void pack(ThreadPool& pool, const MatrixView& source, const PackedMatrix& target, std::int64_t first_tile,
          std::int64_t tile_step);

}  // namespace quire
