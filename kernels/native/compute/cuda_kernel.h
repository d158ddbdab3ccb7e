#pragma once

#include <algorithm>
#include <cstdint>

#include "compute/cuda_driver.h"

namespace quire {

/// A function that a GPU has compiled, and how work items are divided among threads (kernels/emit/cuda/threads.py).
///
/// A block computes as many items as its threads suffice for; an item that needs more threads than a block may have
/// gets several whole blocks.
struct CudaKernel {
  CudaDriver::Handle function;
  std::int64_t threads_per_item;
  std::int64_t threads_per_block;  ///< at most
  unsigned shared_bytes;           ///< of a block, beside what its code declares

  struct Grid {
    unsigned blocks, threads;
  };

  /// Returns the grid for so many items: all multiprocessors get some before any gets many.
  Grid grid(std::int64_t items, std::int64_t multiprocessors) const {
    if (threads_per_item >= threads_per_block)
      return make(items * (threads_per_item / threads_per_block), threads_per_block);
    const std::int64_t most = threads_per_block / threads_per_item;
    const std::int64_t each = std::clamp((items + multiprocessors - 1) / multiprocessors, std::int64_t{1}, most);
    return make((items + each - 1) / each, each * threads_per_item);
  }

 private:
  static Grid make(std::int64_t blocks, std::int64_t threads) {
    return {static_cast<unsigned>(blocks), static_cast<unsigned>(threads)};
  }
};

}  // namespace quire
