#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "jit/object_cache.h"

namespace quire {

/// The target of code generation: an LLVM CPU name, extra features, and the vector width that LLVM should prefer. It is
/// fixed for each instruction set and never detected, so that equal kernels are equal objects on every machine.
struct Target {
  std::string cpu;
  std::string features;
  int vector_bits = 0;
};

/// Returns the CPU features that this host and its operating system grant, by LLVM's names ("avx512f", "amx-bf16").
std::vector<std::string> host_features();

/// Returns LLVM's version, which is part of every cache key.
std::string llvm_version();

/// Compiles MLIR text (arith, math, scf, vector, func and llvm dialects) to functions in this process.
///
/// Objects are cached in `cache_dir` (empty: not cached), keyed by source, pipeline, target and LLVM version.
class Jit {
 public:
  /// Throws std::invalid_argument for a target that LLVM does not know.
  Jit(Target target, std::filesystem::path cache_dir);
  ~Jit();
  Jit(const Jit&) = delete;
  Jit& operator=(const Jit&) = delete;

  /// Compiles a module and returns the addresses of `symbols`, in order. Throws std::runtime_error with MLIR's or
  /// LLVM's diagnostics. Any thread, several at the same time too.
  std::vector<std::uintptr_t> compile(const std::string& source, const std::vector<std::string>& symbols);

  /// Returns the assembly of a module, for inspection.
  std::string assembly(const std::string& source) const;

  const ObjectCache& cache() const { return cache_; }

 private:
  struct Impl;

  Target target_;
  ObjectCache cache_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace quire
