#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

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
/// Objects are cached in `cache_dir` (empty: not cached), keyed by source, pipeline, target and LLVM version. An entry
/// carries its key and the digest of its object: one that is truncated, damaged or under another entry's name is
/// `rejected` and compiled again. Writers rename a private file into place, so processes may share the folder.
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

  int compiled() const { return compiled_; }      ///< number of modules compiled
  int cache_hits() const { return cache_hits_; }  ///< number of modules read from the cache

  /// Returns the entries of the cache that could not be used, each with the reason.
  std::vector<std::string> rejected() const;

 private:
  struct Impl;
  std::string key_of(const std::string& source) const;

  Target target_;
  std::filesystem::path cache_dir_;
  std::unique_ptr<Impl> impl_;
  std::atomic<int> compiled_ = 0;
  std::atomic<int> cache_hits_ = 0;
  mutable std::mutex mutex_;  ///< guards `rejected_`
  std::vector<std::string> rejected_;
};

}  // namespace quire
