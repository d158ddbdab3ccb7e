#pragma once

#include <filesystem>
#include <vector>

namespace quire {

inline constexpr int kMaxThreads = 1024;

/// Returns the affinity mask of this process as CPU numbers, ascending. Empty if the system does not report it.
std::vector<int> affinity_cpus();

/// Returns the number of CPUs that this process may use concurrently: the affinity mask, limited by the CPU quotas
/// (rounded up) of its cgroup and of all parent cgroups, version 1 or 2. At least 1. /proc and /sys are read below
/// `root`.
int available_cpus(const std::filesystem::path& root = "/");

/// Returns the default number of compute threads: the environment variable QUIRE_THREADS if it is set, otherwise one
/// for each physical core of the affinity mask, at most `available_cpus(root)`. Two threads on one core would share its
/// vector units and be no faster. Throws std::invalid_argument if QUIRE_THREADS is not an integer in [1, kMaxThreads].
int default_threads(const std::filesystem::path& root = "/");

}  // namespace quire
