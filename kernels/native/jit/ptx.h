#pragma once

#include <filesystem>
#include <string>

#include "jit/object_cache.h"

namespace quire {

/// Compiles MLIR text to PTX, the assembly of NVIDIA's GPUs, which their driver turns into code of a GPU.
///
/// Neither a GPU nor a toolkit is needed. A module's functions with the calling convention `ptx_kernelcc` are what
/// launches name. Floats are computed as on the CPU: each operation rounds to nearest, denormals are zero.
class PtxCompiler {
 public:
  /// `architecture`: "sm_90" and the like. Throws std::invalid_argument for one that LLVM does not know.
  PtxCompiler(std::string architecture, std::filesystem::path cache_dir);

  /// Returns the PTX of a module. Throws std::runtime_error with MLIR's or LLVM's diagnostics. Any thread.
  std::string compile(const std::string& source);

  const ObjectCache& cache() const { return cache_; }

 private:
  std::string architecture_;
  ObjectCache cache_;
};

}  // namespace quire
