#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace quire {

/// What code is generated for: an LLVM CPU name, extra features, and the vector width that LLVM should prefer.
/// Fixed per instruction set, never read off the host, so that equal kernels are equal objects on every machine.
struct Target {
  std::string cpu;
  std::string features;
  int vector_bits = 0;
};

/// Names of the CPU features that this host and its operating system grant (LLVM's names, "avx512f", "amx-bf16").
std::vector<std::string> host_features();

/// LLVM's version, part of every cache key.
std::string llvm_version();

/// Compiles MLIR text (arith, math, scf, vector, func and llvm dialects) to functions in this process.
///
/// Objects are kept in `cache_dir` (empty: nowhere), keyed by source, pipeline, target and LLVM version. An entry
/// carries its own digest: one that is truncated or damaged is compiled again. Writers use a private name and
/// rename it, so processes may share the folder.
class Jit {
 public:
  Jit(Target target, std::filesystem::path cache_dir);
  ~Jit();
  Jit(const Jit&) = delete;
  Jit& operator=(const Jit&) = delete;

  /// Addresses of `symbols`, in their order. Throws std::runtime_error with MLIR's or LLVM's diagnostics.
  std::vector<std::uintptr_t> compile(const std::string& source, const std::vector<std::string>& symbols);

  /// Assembly of the module, for people.
  std::string assembly(const std::string& source) const;

  int compiled() const { return compiled_; }      ///< modules compiled since the start
  int cache_hits() const { return cache_hits_; }  ///< modules taken from the cache since the start

 private:
  struct Impl;
  std::filesystem::path entry_path(const std::string& source) const;

  Target target_;
  std::filesystem::path cache_dir_;
  std::unique_ptr<Impl> impl_;
  int compiled_ = 0;
  int cache_hits_ = 0;
};

}  // namespace quire
