#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace quire {

/// Compiled kernels on disk, which processes may share.
///
/// An entry carries its key and the digest of its object: one that is truncated, damaged or under another entry's name
/// is `rejected` and compiled again. Writers rename a private file into place. A folder that is not writable is no
/// error: the cache is only an optimisation.
class ObjectCache {
 public:
  /// Keeps entries in `folder`; empty: nothing is kept.
  explicit ObjectCache(std::filesystem::path folder) : folder_(std::move(folder)) {}

  /// Returns the object of a kernel whose code depends on `parts` alone: from the cache, or else compiled and added.
  /// `suffix`: of the file's name. Any thread.
  std::string get(std::initializer_list<std::string> parts, const char* suffix,
                  const std::function<std::string()>& compile);

  int compiled() const { return compiled_; }  ///< number of objects compiled
  int hits() const { return hits_; }          ///< number of objects read from disk

  /// Returns the entries that could not be used, each with the reason.
  std::vector<std::string> rejected() const;

 private:
  std::filesystem::path folder_;
  std::atomic<int> compiled_ = 0;
  std::atomic<int> hits_ = 0;
  mutable std::mutex mutex_;  ///< guards `rejected_`
  std::vector<std::string> rejected_;
};

}  // namespace quire
